"""Latency classes: what the tokens of a request count beside those of others. Pure."""

from __future__ import annotations

import math

# A step of priority counts so much more, and steps beyond these make no difference.
WEIGHT_PER_STEP = 2.0
MOST_STEPS = 2


def class_weight(priority: int) -> float:
    """What a token counts: twice as much for each step of priority, from 1/4 at -2 and below to 4 at 2 and above.

    Interactive requests are those of higher priority than others. What is maximised is the weighted sum of tokens per
    second, so that only ratios of weights count: where all requests have one priority, classes change nothing.
    """
    return float(WEIGHT_PER_STEP ** max(-MOST_STEPS, min(MOST_STEPS, priority)))


class ClassWeights:
    """The mean weight of the requests that have begun and not ended, and its logarithm."""

    def __init__(self) -> None:
        self._num = 0
        self._sum = 0.0
        self.mean = 1.0
        self.log_mean = 0.0

    def add(self, weight: float) -> None:
        """A request begins."""
        self._num += 1
        self._sum += weight
        self._solve()

    def remove(self, weight: float) -> None:
        """A request has ended."""
        self._num -= 1
        # Weights are powers of two, so that sums of them are exact.
        self._sum -= weight
        self._solve()

    def _solve(self) -> None:
        self.mean = self._sum / self._num if self._num else 1.0
        self.log_mean = math.log(self.mean)
