"""How often the cache's guesses come true: counted by kind of guess, and what its log-probabilities are made of."""

from __future__ import annotations

import bisect
import enum

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
