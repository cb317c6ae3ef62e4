"""A round's bounded wait for its draft; none while waiting does not pay."""

from __future__ import annotations

# After this many waits without a draft in a row, rounds stop waiting and only retry now and then.
_PATIENCE = 2
_LONGEST_PAUSE = 64


class Linger:
    """Linger of one sequence. A silent drafter costs a few waits at first, then a vanishing share of rounds."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._misses = 0
        self._pause = 0

    def wait_s(self) -> float:
        """Longest wait of the coming round after the last outcome, in seconds."""
        return 0.0 if self._pause > 0 else self.limit_s

    def round_over(self, *, drafted: bool) -> None:
        """Learn from a round; `drafted`: its draft had arrived."""
        if drafted:
            self._misses = 0
            self._pause = 0
        elif self._pause > 0:
            self._pause -= 1
        elif self.limit_s > 0:
            self._misses += 1
            if self._misses >= _PATIENCE:
                self._pause = min(_LONGEST_PAUSE, 2**self._misses)
