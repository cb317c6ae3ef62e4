"""Time for drafting ahead: until shortly before the outcome, estimated from earlier rounds."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

# Recent rounds considered. Their lower quartile counts: late drafts are useless.
_LATEST = 8
# Rounds of a sequence below which all sequences' count: its first round may include a long prompt.
_FEWEST = 4
# Fractions of that time after which reading stops, and making of trees. Trees must reach the verifier before the end
# of its pass, which is earlier than the outcome arrives here.
READING_SHARE = 0.5
MAKING_SHARE = 0.65


class RoundLengths:
    """Durations of recent rounds, in seconds."""

    def __init__(self) -> None:
        self._latest_s: deque[float] = deque(maxlen=_LATEST)
        # Lower quartile; infinite without rounds.
        self.usual_s = math.inf

    def __len__(self) -> int:
        return len(self._latest_s)

    def add(self, length_s: float) -> None:
        """Add a round."""
        self._latest_s.append(length_s)
        self.usual_s = sorted(self._latest_s)[len(self._latest_s) // 4]


class AheadPace:
    """Pace of one sequence. Rounds count as long until some were seen, of its own or of `all_rounds`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, all_rounds: RoundLengths | None = None) -> None:
        """`all_rounds` are shared by all sequences of a drafter."""
        self._clock = clock
        self._own = RoundLengths()
        self._all = RoundLengths() if all_rounds is None else all_rounds
        self._began_s: float | None = None

    def expect(self) -> None:
        """Start timing a round."""
        self._began_s = self._clock()

    def outcome_came(self) -> None:
        """End timing the round."""
        if self._began_s is None:
            return
        length_s, self._began_s = self._clock() - self._began_s, None
        # Ignore a clock that stands still.
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
