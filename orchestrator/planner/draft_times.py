"""Times of drafts: when drafters were asked for them, and how long they take, the way to the verifier included."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

# Outcomes after which a draft may still come.
_MOST = 64
# Drafts, and waits, that are looked back at. The quickest of them count: a slow hour of the drafter's, or others that a
# pass waited for, say little of the next.
_LATEST = 32
# Fewer say nothing.
_FEWEST = 4
# By how much longer than a wait that was in vain its draft would have needed is not known: by this share, at least.
_BEYOND = 0.1


class AskTimes:
    """By committed length, when the first drafter was told of the outcome that made it so many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[int, float] = {}
        # Those of them after which a draft has come.
        self._answered: set[int] = set()

    def note(self, length: int) -> None:
        """A drafter is told, now."""
        if length not in self._times:
            if len(self._times) >= _MOST:
                oldest = next(iter(self._times))
                del self._times[oldest]
                self._answered.discard(oldest)
            self._times[length] = self._clock()

    def elapsed_s(self, length: int) -> float | None:
        """Seconds since; None where nobody was asked."""
        asked_s = self._times.get(length)
        return None if asked_s is None else self._clock() - asked_s

    def first_took_s(self, length: int) -> float | None:
        """As `elapsed_s`, for the first draft after this length; None where one has come before."""
        if length in self._answered or length not in self._times:
            return None
        self._answered.add(length)
        return self.elapsed_s(length)


class DraftTimes:
    """What a draft takes at its drafter, and on the way between verifier and orchestrator.

    A round waits from when the verifier has its last outcome to when it has the draft. That is longer than the
    orchestrator sees its drafter take: by the outcome's way here and the tree's way back. The way is learned from
    rounds that waited: one that began with the draft made for it tells it exactly, one that waited in vain that it is
    longer than that. It is taken to be 0 until some have, and to stay what it was while nobody waits.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_LATEST)
        # Of rounds that waited: seconds on the way, and whether they are that or more.
        self._ways: deque[tuple[float, bool]] = deque(maxlen=_LATEST)
        # From when a drafter was told of an outcome to when its draft after it was here: what the quickest of the
        # latest took; 0 while hardly any is known.
        self.quickest_s = 0.0
        # From the verifier to here and back.
        self.way_s = 0.0

    @property
    def needed_s(self) -> float:
        """The least that a round has to wait for its draft."""
        return self.quickest_s + self.way_s

    def add(self, seconds: float) -> None:
        """A draft has come, in time or late."""
        self._latest.append(seconds)
        if len(self._latest) >= _FEWEST:
            self.quickest_s = min(self._latest)

    def waited(self, waited_s: float, took_s: float, *, was_in_time: bool) -> None:
        """A round waited so long, whose draft took `took_s`, and began with that, or without."""
        way_s = waited_s - took_s if was_in_time else (1 + _BEYOND) * waited_s - took_s
        if way_s < 0:
            # It began with something else, or the drafter was slow: that says nothing.
            return
        self._ways.append((way_s, was_in_time))
        if len(self._ways) >= _FEWEST:
            exact = [seconds for seconds, is_exact in self._ways if is_exact]
            self.way_s = min(exact) if exact else max(seconds for seconds, _ in self._ways)
