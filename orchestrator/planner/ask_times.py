"""When drafters were asked for a request's drafts."""

from __future__ import annotations

import time
from collections.abc import Callable

# Outcomes behind which a draft may still come.
_MOST = 64


class AskTimes:
    """By committed length, when the first drafter was told of the outcome that made it so many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[int, float] = {}
        # Those of them behind which a draft has come.
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
        """As `elapsed_s`, for the first draft behind this length; None where one has come before."""
        if length in self._answered or length not in self._times:
            return None
        self._answered.add(length)
        return self.elapsed_s(length)
