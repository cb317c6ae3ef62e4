"""Load of running requests: weights of their latency classes, and prompts waiting for prefill."""

from __future__ import annotations

import math
from collections.abc import Callable

# Factor of a token's weight per step of priority, and bound of steps.
WEIGHT_PER_STEP = 2.0
MOST_STEPS = 2
# Up to this many waiting prompts are ignored.
FEW_PROMPTS = 4
# Sequences that wait longer lack KV blocks, not prefill, and drafting may help.
LONGEST_S = 10.0


def class_weight(priority: int) -> float:
    """Weight of a token: doubles per step of priority, from 1/4 at -2 and below to 4 at 2 and above.

    Interactive requests have higher priority than others. The objective is the weighted sum of tokens per second, so
    only ratios matter: with one priority for all requests, weights change nothing.
    """
    return float(WEIGHT_PER_STEP ** max(-MOST_STEPS, min(MOST_STEPS, priority)))


class ClassWeights:
    """Mean weight of open requests, and its log."""

    def __init__(self) -> None:
        self._num, self._sum = 0, 0.0
        self.mean, self.log_mean = 1.0, 0.0

    def add(self, weight: float, count: int = 1) -> None:
        """Add a request, or remove one with a `count` of -1."""
        self._num += count
        # Exact: weights are powers of two.
        self._sum += count * weight
        self.mean = self._sum / self._num if self._num else 1.0
        self.log_mean = math.log(self.mean)


class PrefillPressure:
    """Requests whose prompts the verifier has not prefilled yet.

    A prefill pass starts at once, without requests that wait for drafts; meanwhile drafters prefill the same prompts,
    which takes precedence over drafts and, on a shared machine, slows the verifier down.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # This orchestrator's requests, and the verifier's queue as last reported, other orchestrators' included.
        self.num_unread = self.num_queued = 0
        self._crowded_since_s: float | None = None

    def is_crowded(self) -> bool:
        """Whether more than a few prompts wait, or some still do after more than a few."""
        num_waiting = self.num_unread if self.num_unread > self.num_queued else self.num_queued
        if num_waiting == 0 or (num_waiting <= FEW_PROMPTS and not self._is_fresh()):
            self._crowded_since_s = None
            return False
        if num_waiting > FEW_PROMPTS and self._crowded_since_s is None:
            self._crowded_since_s = self._clock()
        return self._is_fresh()

    def _is_fresh(self) -> bool:
        return self._crowded_since_s is not None and self._clock() - self._crowded_since_s <= LONGEST_S
