"""When to stop asking something that does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable

# Failures in a row after which nothing is asked for a while, longer each time that the next try fails, too.
_PATIENCE = 3
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class Breaker:
    """Opens after some failures in a row; after a pause it lets one try through."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._closed_until_s = 0.0
        self._is_trying = False

    def allows(self) -> bool:
        """Whether to ask now. Of those who ask for leave after a pause, one gets it until its answer is known."""
        if self._failures < _PATIENCE:
            return True
        now = self._clock()
        if now < self._closed_until_s:
            return False
        self._closed_until_s = now + self._pause_s
        self._is_trying = True
        return True

    def succeeded(self) -> None:
        """It has answered."""
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._is_trying = False

    def failed(self) -> bool:
        """It has not; returns whether this is what opened the breaker."""
        self._failures += 1
        opens = self._failures == _PATIENCE
        # Others that were under way when it opened say nothing new.
        if opens or self._is_trying:
            self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s) if self._is_trying else _FIRST_PAUSE_S
            self._closed_until_s = self._clock() + self._pause_s
        self._is_trying = False
        return opens
