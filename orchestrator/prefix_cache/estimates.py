"""Estimates of the prefix cache: hit rates of guesses, lengths of matches, tokens that drafters usually promise."""

from __future__ import annotations

import bisect
import enum
from collections.abc import Sequence
from dataclasses import dataclass

from coppice.core.tree import TokenTree

_LENGTHS = (2, 3, 4, 6, 9, 16)
_DEPTHS = (1, 2, 4, 8)
# Siblings beyond the second count as one kind.
_RANKS = 2
# What a kind starts with, by length of the match: how often greedy decoding goes on as it did before.
_PRIORS = (0.15, 0.3, 0.45, 0.6, 0.7, 0.8)
# Guesses that a prior is worth.
_PRIOR_WEIGHT = 8.0
# Then both counts are halved, so that old guesses fade.
_MOST_TRIALS = 512.0
# Nothing is sure.
MOST = 0.98
# Guesses that "as all others" is worth, and most that what is known of a prompt's beginning is worth.
_WEIGHT = 4.0
_MOST_KNOWN = 16.0
_LEAST, _MOST = 0.2, 1.5
# Before anything was seen, one token of so many is taken to be wrong: too many for a guess to be worth more than what
# drafters usually say.
_PRIOR_TOKENS = 5.0
# So many more where the whole prompt was answered before, and greedily now as then.
_REPEATED_TOKENS = 32.0
# Weight of a tree in the running mean of an output, and of all.
_RATE_OF_OUTPUT = 0.2
_RATE_OF_ALL = 0.02


class DraftersWord(enum.IntEnum):
    """What drafters said at a guess's place: nothing was asked of them, something else, or nothing."""

    ALONE = 0
    AGAINST = 1
    BEYOND = 2


class HitRates:
    """Estimates P(a guess is right | its parent is right) for each kind of guess. Shared by all requests."""

    def __init__(self) -> None:
        self._priors = [
            _prior(sampled, place, remembered, length, depth, rank)
            for sampled in (False, True)
            for place in DraftersWord
            for remembered in (False, True)
            for length in range(len(_LENGTHS))
            for depth in range(len(_DEPTHS))
            for rank in range(_RANKS)
        ]
        self._hits = [_PRIOR_WEIGHT * prior for prior in self._priors]
        self._trials = [_PRIOR_WEIGHT] * len(self._priors)

    def rate(self, kind: int) -> float:
        """The estimate for a kind of guess."""
        return min(MOST, self._hits[kind] / self._trials[kind])

    def count(self, kind: int, hit: bool) -> None:
        """A guess of this kind was right or wrong, and its parent right."""
        self._hits[kind] += hit
        self._trials[kind] += 1
        if self._trials[kind] > _MOST_TRIALS:
            self._hits[kind] /= 2
            self._trials[kind] /= 2


def kind_of(sampled: bool, place: DraftersWord, remembered: bool, length: int, depth: int, rank: int) -> int:
    """The number of a kind of guess.

    `sampled`: at a temperature above 0. `remembered`: from other requests, not from this one's own tokens. `length`:
    tokens that matched before the root. `depth`: 1 for the root's children. `rank`: siblings guessed before it.
    """
    kind = (int(sampled) * len(DraftersWord) + place) * 2 + int(remembered)
    kind = kind * len(_LENGTHS) + _bucket(_LENGTHS, length)
    kind = kind * len(_DEPTHS) + _bucket(_DEPTHS, depth)
    return kind * _RANKS + min(rank, _RANKS - 1)


def _bucket(starts: tuple[int, ...], value: int) -> int:
    # What is less than the first start belongs to it, too.
    return bisect.bisect_right(starts, value, lo=1) - 1


def _prior(sampled: bool, place: DraftersWord, remembered: bool, length: int, depth: int, rank: int) -> float:
    rate = _PRIORS[length]
    if remembered:
        rate = 1 - 0.7 * (1 - rate)
    if depth:
        # The tokens before it were right, too: as good as a longer match.
        rate = 1 - 0.6**depth * (1 - rate)
    if sampled:
        rate *= 0.6
    if place is DraftersWord.AGAINST:
        rate *= 0.3
    return rate * 0.3 if rank else rate


@dataclass
class HitRatePrior:
    """Right guesses of this request, and how many of them the common rates had expected."""

    hits: float = 0.0
    expected: float = 0.0
    # What requests with the same beginning make likely, as if it were guesses of this one.
    _known_hits: float = 0.0
    _known_expected: float = 0.0

    def know(self, hits: float, expected: float) -> None:
        """Take what earlier requests have shown for a few guesses of this one's."""
        share = min(1.0, _MOST_KNOWN / expected) if expected > 0 else 0.0
        self._known_hits, self._known_expected = hits * share, expected * share

    @property
    def factor(self) -> float:
        """What to multiply the common rates by."""
        hits, expected = self.hits + self._known_hits, self.expected + self._known_expected
        return min(_MOST, max(_LEAST, (hits + _WEIGHT) / (expected + _WEIGHT)))


class MatchLengthEstimate:
    """The first of an output's guesses against what was committed, token by token, whether it was proposed or not.

    Guesses that come true do so together, and those after a wrong one are all wrong. Rates of single guesses, taken
    over all requests, cannot tell an output that repeats another from one that leaves it every few tokens; the tokens
    between two mistakes of this output can.
    """

    def __init__(self) -> None:
        self._num_tokens = _PRIOR_TOKENS
        self._num_wrong = 1.0

    def repeats(self) -> None:
        """What is guessed is what followed the very same prompt."""
        self._num_tokens += _REPEATED_TOKENS

    def learn(self, guessed: Sequence[int], token_ids: Sequence[int]) -> None:
        """These `token_ids` were committed where `guessed` were to come next."""
        for guess, token in zip(guessed, token_ids, strict=False):
            self._num_tokens += 1
            if guess != token:
                self._num_wrong += 1
                return

    def expected_tokens(self, num_guessed: int) -> float:
        """How many of so many tokens in a row are right before the first that is not, on average."""
        wrong = self._num_wrong / self._num_tokens
        right = 1 - wrong
        return right * (1 - right**num_guessed) / wrong


class CachePromise:
    """A running mean over trees; 0 before the first."""

    def __init__(self, tokens: float = 0.0, rate: float = _RATE_OF_ALL, of_all: CachePromise | None = None) -> None:
        self.tokens = tokens
        self._rate = rate
        self._of_all = of_all

    def of_output(self) -> CachePromise:
        """What one output goes by: it begins with what all others do, and tells them."""
        return CachePromise(self.tokens, _RATE_OF_OUTPUT, self)

    def add(self, tree: TokenTree) -> None:
        """Count drafters' tree. An empty one promises nothing, and says nothing of others."""
        if len(tree):
            self._count(tree.expected_tokens)

    def _count(self, promised: float) -> None:
        self.tokens += (self._rate if self.tokens else 1.0) * (promised - self.tokens)
        if self._of_all is not None:
            self._of_all._count(promised)
