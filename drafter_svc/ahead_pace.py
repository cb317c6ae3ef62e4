"""How long drafting ahead may take: until shortly before the outcome, whose time is known from the rounds before."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

# Rounds that are looked back at. Of their lengths the lower quartile counts: what is late is of no use at all.
_LATEST = 8
# Shares of that time after which nothing more is read, and no further tree is put together. What is made has to reach
# the verifier before its pass ends, which is earlier than its outcome is here.
READING_SHARE = 0.5
MAKING_SHARE = 0.65


class AheadPace:
    """One sequence's. Rounds are taken to be long until some have been seen."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lengths_s: deque[float] = deque(maxlen=_LATEST)
        self._usual_s = math.inf
        self._began_s: float | None = None

    def expect(self) -> None:
        """A round runs whose outcome is drafted for from now on."""
        self._began_s = self._clock()

    def outcome_came(self) -> None:
        """The round is over."""
        if self._began_s is None:
            return
        length_s, self._began_s = self._clock() - self._began_s, None
        # A clock that stands still says nothing.
        if length_s > 0:
            self._lengths_s.append(length_s)
            self._usual_s = sorted(self._lengths_s)[len(self._lengths_s) // 4]

    @property
    def may_read(self) -> bool:
        """Whether there is time for another forward pass."""
        return self._spent_s < READING_SHARE * self._usual_s

    @property
    def may_make(self) -> bool:
        """Whether there is time for another tree."""
        return self._spent_s < MAKING_SHARE * self._usual_s

    @property
    def _spent_s(self) -> float:
        return 0.0 if self._began_s is None else self._clock() - self._began_s
