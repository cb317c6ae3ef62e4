"""The time for drafting ahead: until shortly before the outcome, as the rounds before suggest."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

# Rounds that are looked back at. Of their lengths the lower quartile counts: what is late is of no use at all.
_LATEST = 8
# While a sequence has seen fewer rounds than this, those of all count: its first one may have read a long prompt.
_FEWEST = 4
# Shares of that time after which nothing more is read, and no further tree is put together. What is made has to reach
# the verifier before its pass ends, which is earlier than its outcome is here.
READING_SHARE = 0.5
MAKING_SHARE = 0.65


class RoundLengths:
    """How long the latest rounds have taken, in seconds."""

    def __init__(self) -> None:
        self._latest_s: deque[float] = deque(maxlen=_LATEST)
        # Of a short one; infinite while there is none.
        self.usual_s = math.inf

    def __len__(self) -> int:
        return len(self._latest_s)

    def add(self, length_s: float) -> None:
        """A round is over."""
        self._latest_s.append(length_s)
        self.usual_s = sorted(self._latest_s)[len(self._latest_s) // 4]


class AheadPace:
    """One sequence's. Rounds are taken to be long until some have been seen, of it or of `all_rounds`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, all_rounds: RoundLengths | None = None) -> None:
        """`all_rounds` are those of all sequences of a drafter, which share it."""
        self._clock = clock
        self._own = RoundLengths()
        self._all = RoundLengths() if all_rounds is None else all_rounds
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
            self._own.add(length_s)
            self._all.add(length_s)

    @property
    def may_read(self) -> bool:
        """Whether there is time for another forward pass."""
        return self._spent_s < READING_SHARE * self._usual_s

    @property
    def may_make(self) -> bool:
        """Whether there is time for another tree."""
        return self._spent_s < MAKING_SHARE * self._usual_s

    @property
    def _usual_s(self) -> float:
        return (self._own if len(self._own) >= _FEWEST else self._all).usual_s

    @property
    def _spent_s(self) -> float:
        return 0.0 if self._began_s is None else self._clock() - self._began_s
