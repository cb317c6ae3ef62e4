"""A round's wait for its draft: never longer than asked, and none once waiting has stopped paying."""

from __future__ import annotations

# After this many vain waits in a row, rounds stop waiting and only try again now and then.
_PATIENCE = 2
_LONGEST_PAUSE = 64


class Linger:
    """One sequence's bounded wait. A silent drafter costs at most a few waits, then a vanishing share of rounds."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._misses = 0
        self._pause = 0

    def wait_s(self) -> float:
        """How long the coming round may wait, from the last outcome on."""
        return 0.0 if self._pause > 0 else self.limit_s

    def round_over(self, *, drafted: bool) -> None:
        """Learn from a round: whether its draft had arrived."""
        if drafted:
            self._misses = 0
            self._pause = 0
        elif self._pause > 0:
            self._pause -= 1
        elif self.limit_s > 0:
            self._misses += 1
            if self._misses >= _PATIENCE:
                self._pause = min(_LONGEST_PAUSE, 2**self._misses)
