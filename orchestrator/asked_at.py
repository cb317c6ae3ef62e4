"""When drafters were asked for a request's drafts."""

from __future__ import annotations

import time
from collections.abc import Callable

# Outcomes behind which a draft may still come.
_MOST = 64


class AskedAt:
    """By committed length, when the first drafter was told of the outcome that made it so many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[int, float] = {}

    def note(self, length: int) -> None:
        """A drafter is told, now."""
        if length not in self._times:
            if len(self._times) >= _MOST:
                del self._times[next(iter(self._times))]
            self._times[length] = self._clock()

    def since(self, length: int) -> float | None:
        """Seconds since, for the first draft behind this length; None where nobody was asked or one has come before."""
        asked_s = self._times.pop(length, None)
        return None if asked_s is None else self._clock() - asked_s
