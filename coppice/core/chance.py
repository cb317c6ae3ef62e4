"""Source of random events for sampling rules, and its seeded form.

Rules ask for events by probability rather than for numbers, so a test can enumerate all branches with exact weights,
and a service can replay a round from (seed, committed length).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from coppice.core.noise import philox4x32

FloatArray = npt.NDArray[np.float64]
# A counter gives two uniforms; one call covers a round of a few dozen nodes.
COUNTERS_PER_CALL = 32
_LOW = 0xFFFFFFFF


class Chance(Protocol):
    """Source of independent events."""

    def happens(self, probability: float) -> bool:
        """True with this probability, in [0, 1]."""

    def choice(self, probabilities: FloatArray) -> int:
        """An index drawn in proportion to `probabilities`; never one of probability 0."""


class UniformChance:
    """Events from uniform numbers in [0, 1), one each: `u < p`, and inverse transform sampling."""

    def __init__(self, uniforms: Iterator[float]) -> None:
        self._uniforms = uniforms

    def happens(self, probability: float) -> bool:
        return next(self._uniforms) < probability

    def choice(self, probabilities: FloatArray) -> int:
        cumulated = np.cumsum(probabilities)
        # If rounding reaches the total, the last index of positive probability is drawn.
        last = int(np.flatnonzero(probabilities)[-1])
        return int(np.searchsorted(cumulated[:last], next(self._uniforms) * cumulated[-1], side="right"))


class Purpose(IntEnum):
    """Use of a stream of uniforms. Rules are exact only because streams of different purposes are independent."""

    DRAFT = 1
    ACCEPTANCE = 2


def seeded_chance(seed: int, position: int, purpose: Purpose) -> UniformChance:
    """Events of one round, as a function of the request's seed, its committed length and the purpose."""
    return UniformChance(uniforms(seed, position, purpose))


def uniforms(seed: int, position: int, purpose: Purpose) -> Iterator[float]:
    """Endless uniform numbers in [0, 1), multiples of 2^-53.

    key      = (seed mod 2^32, seed div 2^32)
    words    = philox((i, position mod 2^32, position div 2^32, purpose), key)
    u[2 i]   = (words[0] div 2^5 * 2^26 + words[1] div 2^6) / 2^53, and u[2 i + 1] likewise from words[2] and words[3]

    The request's noise (`coppice/core/noise.py`) uses 0 in place of the purpose, so the two never share a word.
    """
    first = 0
    while True:
        index = np.arange(first, first + COUNTERS_PER_CALL, dtype=np.uint64)
        fixed = [np.full_like(index, word) for word in (position & _LOW, position >> 32, int(purpose))]
        words = philox4x32((index, fixed[0], fixed[1], fixed[2]), (np.uint64(seed & _LOW), np.uint64(seed >> 32)))
        high, low = np.stack(words[::2], axis=-1) >> np.uint64(5), np.stack(words[1::2], axis=-1) >> np.uint64(6)
        yield from ((high * np.uint64(2**26) + low).astype(np.float64) / 2.0**53).ravel().tolist()
        first += COUNTERS_PER_CALL
