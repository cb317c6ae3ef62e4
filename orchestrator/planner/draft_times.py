"""Durations of drafts: from the request to the drafter's reply, and with the transfer to the verifier."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

# Upper bound of pending committed lengths.
_MOST = 64
# Drafts and waits remembered. Their minimum is used: slow drafts and passes that waited for others do not predict the
# next.
_LATEST = 32
# Least observations before results are used.
_FEWEST = 4
# Wait assumed for a draft that missed its linger: longer by this share.
_BEYOND = 0.1


class AskTimes:
    """Times at which the first drafter was told of an outcome, by committed length."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[int, float] = {}
        # Lengths that a draft has arrived for.
        self._answered: set[int] = set()

    def note(self, length: int) -> None:
        """Record that a drafter is told of this committed length now."""
        if length not in self._times:
            if len(self._times) >= _MOST:
                oldest = next(iter(self._times))
                del self._times[oldest]
                self._answered.discard(oldest)
            self._times[length] = self._clock()

    def elapsed_s(self, length: int) -> float | None:
        """Seconds since `note(length)`; None without one."""
        asked_s = self._times.get(length)
        return None if asked_s is None else self._clock() - asked_s

    def first_took_s(self, length: int) -> float | None:
        """`elapsed_s` for the first draft of this length; None for later ones."""
        if length in self._answered or length not in self._times:
            return None
        self._answered.add(length)
        return self.elapsed_s(length)


class DraftTimes:
    """Durations of drafts at the drafter, and of the transfer between verifier and orchestrator.

    A round waits from its last outcome at the verifier until the draft arrives there: the drafter's duration as seen by
    the orchestrator, plus the outcome's and the tree's transfer. The transfer is learned from rounds that waited:
    exactly from one that began with its draft, as a lower bound from one whose draft was late. It is 0 before the
    first, and kept while no round waits.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_LATEST)
        # Of rounds that waited: transfer time in seconds, and whether exact or a lower bound.
        self._ways: deque[tuple[float, bool]] = deque(maxlen=_LATEST)
        # From telling a drafter of an outcome to its draft's arrival: minimum of recent ones; 0 if too few.
        self.quickest_s = 0.0
        # Transfer from the verifier to the orchestrator and back.
        self.way_s = 0.0

    @property
    def needed_s(self) -> float:
        """Least linger with which a round gets its draft, in seconds."""
        return self.quickest_s + self.way_s

    def add(self, seconds: float) -> None:
        """Record a draft's duration, in time or late."""
        self._latest.append(seconds)
        if len(self._latest) >= _FEWEST:
            self.quickest_s = min(self._latest)

    def waited(self, waited_s: float, took_s: float, *, was_in_time: bool) -> None:
        """Record a linger of `waited_s` for a draft that took `took_s`, and whether the draft was in time."""
        way_s = waited_s - took_s if was_in_time else (1 + _BEYOND) * waited_s - took_s
        if way_s < 0:
            # The round began with another draft, or the drafter was slow: no information.
            return
        self._ways.append((way_s, was_in_time))
        if len(self._ways) >= _FEWEST:
            exact = [seconds for seconds, is_exact in self._ways if is_exact]
            self.way_s = min(exact) if exact else max(seconds for seconds, _ in self._ways)
