"""Load of the running requests: the weight of their latency classes, and prompts that wait to be read."""

from __future__ import annotations

import math
from collections.abc import Callable

# A step of priority counts so much more, and steps beyond these make no difference.
WEIGHT_PER_STEP = 2.0
MOST_STEPS = 2
# So many prompts at a time are read on the side.
FEW_PROMPTS = 4
# Sequences that wait longer than this wait for room rather than for others' prompts, and drafting may give them some.
LONGEST_S = 10.0


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


class PrefillPressure:
    """Counts requests whose prompts the verifier has still to read.

    A pass that reads a prompt starts at once, without those who wait for their drafts; and drafters that read prompts
    of newcomers meanwhile, dear work that comes before anybody's draft, keep a shared machine from the verifier.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Our own requests', and sequences that wait at the verifier, those of others among them, when it last told.
        self.num_unread = 0
        self.num_queued = 0
        self._crowded_since_s: float | None = None

    def is_crowded(self) -> bool:
        """Whether there are more than a few prompts, or some are left of so many."""
        num_waiting = self.num_unread if self.num_unread > self.num_queued else self.num_queued
        if num_waiting == 0 or (num_waiting <= FEW_PROMPTS and not self._is_fresh()):
            self._crowded_since_s = None
            return False
        if num_waiting > FEW_PROMPTS and self._crowded_since_s is None:
            self._crowded_since_s = self._clock()
        return self._is_fresh()

    def _is_fresh(self) -> bool:
        return self._crowded_since_s is not None and self._clock() - self._crowded_since_s <= LONGEST_S
