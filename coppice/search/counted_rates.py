"""Rates of guesses that are right, by kind: counted from priors, with old guesses fading."""

from __future__ import annotations

from collections.abc import Sequence

# Guesses that a prior is worth, and after how many of a kind both counts are halved.
_PRIOR_WEIGHT, _MOST_TRIALS = 8.0, 512.0
# Upper bound of a rate: no guess is certain.
MOST_CERTAIN = 0.98


class CountedRates:
    """P(guess is right | its parent is right) for each kind of guess; kinds are indices of `priors`."""

    def __init__(self, priors: Sequence[float]) -> None:
        self._hits = [_PRIOR_WEIGHT * prior for prior in priors]
        self._trials = [_PRIOR_WEIGHT] * len(priors)

    def rate(self, kind: int) -> float:
        """Estimate for a kind of guess."""
        return min(MOST_CERTAIN, self._hits[kind] / self._trials[kind])

    def count(self, kind: int, hit: bool) -> None:
        """Record a guess whose parent was right."""
        self._hits[kind] += hit
        self._trials[kind] += 1
        if self._trials[kind] > _MOST_TRIALS:
            self._hits[kind] /= 2
            self._trials[kind] /= 2
