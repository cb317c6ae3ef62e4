"""Estimates of the prefix cache: hit rates of guesses, match lengths, drafters' mean promise."""

from __future__ import annotations

import bisect
import enum
from collections.abc import Sequence
from dataclasses import dataclass

from coppice.core.tree import TokenTree
from coppice.search.counted_rates import CountedRates

_LENGTHS = (2, 3, 4, 6, 9, 16)
_DEPTHS = (1, 2, 4, 8)
# Ranks of siblings told apart; later ones count as the last.
_RANKS = 2
# Prior hit rates by match length: how often greedy decoding continues as before.
_PRIORS = (0.15, 0.3, 0.45, 0.6, 0.7, 0.8)
# Weights in guesses: of the factor 1, and at most of the statistics of earlier requests.
_WEIGHT = 4.0
_MOST_KNOWN = 16.0
_LEAST, _MOST = 0.2, 1.5
# Prior of one wrong token in so many: low enough for a guess to be worth less than a typical draft.
_PRIOR_TOKENS = 5.0
# Added for a repeated prompt under greedy decoding.
_REPEATED_TOKENS = 32.0
# Weights of a tree in the running means of an output, and of all outputs.
_RATE_OF_OUTPUT = 0.2
_RATE_OF_ALL = 0.02


class DraftersWord(enum.IntEnum):
    """Drafters' answer at a guess's position: not asked, another token, or none."""

    ALONE = 0
    AGAINST = 1
    BEYOND = 2


class HitRates(CountedRates):
    """P(guess is right | its parent is right) by kind of guess. Shared by all requests."""

    def __init__(self) -> None:
        super().__init__(
            [
                _prior(sampled, place, remembered, length, depth, rank)
                for sampled in (False, True)
                for place in DraftersWord
                for remembered in (False, True)
                for length in range(len(_LENGTHS))
                for depth in range(len(_DEPTHS))
                for rank in range(_RANKS)
            ]
        )


def kind_of(sampled: bool, place: DraftersWord, remembered: bool, length: int, depth: int, rank: int) -> int:
    """Index of a kind of guess.

    `sampled`: temperature above 0. `remembered`: from another request. `length`: matching tokens before the root.
    `depth`: 1 for the root's children. `rank`: siblings guessed before it.
    """
    kind = (int(sampled) * len(DraftersWord) + place) * 2 + int(remembered)
    kind = kind * len(_LENGTHS) + _bucket(_LENGTHS, length)
    kind = kind * len(_DEPTHS) + _bucket(_DEPTHS, depth)
    return kind * _RANKS + min(rank, _RANKS - 1)


def _bucket(starts: tuple[int, ...], value: int) -> int:
    # Values below the first start belong to it.
    return bisect.bisect_right(starts, value, lo=1) - 1


def _prior(sampled: bool, place: DraftersWord, remembered: bool, length: int, depth: int, rank: int) -> float:
    rate = _PRIORS[length]
    if remembered:
        rate = 1 - 0.7 * (1 - rate)
    if depth:
        # Right ancestors count like a longer match.
        rate = 1 - 0.6**depth * (1 - rate)
    if sampled:
        rate *= 0.6
    if place is DraftersWord.AGAINST:
        rate *= 0.3
    return rate * 0.3 if rank else rate


@dataclass
class HitRatePrior:
    """Hits of this request against the common rates' expectation."""

    hits: float = 0.0
    expected: float = 0.0
    # From requests with the same beginning, as if they were guesses of this one.
    _known_hits: float = 0.0
    _known_expected: float = 0.0

    def know(self, hits: float, expected: float) -> None:
        """Add statistics of earlier requests, scaled down to `_MOST_KNOWN` guesses."""
        share = min(1.0, _MOST_KNOWN / expected) if expected > 0 else 0.0
        self._known_hits, self._known_expected = hits * share, expected * share

    @property
    def factor(self) -> float:
        """Factor on the common rates."""
        hits, expected = self.hits + self._known_hits, self.expected + self._known_expected
        return min(_MOST, max(_LEAST, (hits + _WEIGHT) / (expected + _WEIGHT)))


class MatchLengthEstimate:
    """Expected length of a match, from the output's best guesses compared with its committed tokens.

    Hits come in runs: after a wrong guess all later ones are wrong. Common rates of single guesses cannot tell an
    output that repeats another from one that diverges every few tokens; the run lengths of this output can.
    """

    def __init__(self) -> None:
        self._num_tokens = _PRIOR_TOKENS
        self._num_wrong = 1.0

    def repeats(self) -> None:
        """Raise the estimate: the guesses follow the very same prompt."""
        self._num_tokens += _REPEATED_TOKENS

    def learn(self, guessed: Sequence[int], token_ids: Sequence[int]) -> None:
        """Compare committed `token_ids` with `guessed`, up to the first mistake."""
        for guess, token in zip(guessed, token_ids, strict=False):
            self._num_tokens += 1
            if guess != token:
                self._num_wrong += 1
                return

    def expected_tokens(self, num_guessed: int) -> float:
        """Expected number of right tokens before the first wrong one among `num_guessed`."""
        wrong = self._num_wrong / self._num_tokens
        right = 1 - wrong
        return right * (1 - right**num_guessed) / wrong


class CachePromise:
    """Running mean of expected tokens over drafters' trees; 0 before the first."""

    def __init__(self, tokens: float = 0.0, rate: float = _RATE_OF_ALL, of_all: CachePromise | None = None) -> None:
        self.tokens = tokens
        self._rate = rate
        self._of_all = of_all

    def of_output(self) -> CachePromise:
        """Mean of one output, which starts from the common one and updates it."""
        return CachePromise(self.tokens, _RATE_OF_OUTPUT, self)

    def add(self, tree: TokenTree) -> None:
        """Add a drafters' tree; empty ones are skipped."""
        if len(tree):
            self._count(tree.expected_tokens)

    def _count(self, promised: float) -> None:
        self.tokens += (self._rate if self.tokens else 1.0) * (promised - self.tokens)
        if self._of_all is not None:
            self._of_all._count(promised)
