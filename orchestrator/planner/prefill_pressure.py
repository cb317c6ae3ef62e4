"""Whether the verifier has many prompts to read: then nobody drafts, and nothing is concluded."""

from __future__ import annotations

from collections.abc import Callable

# So many prompts at a time are read on the side.
FEW_PROMPTS = 4
# Sequences that wait longer than this wait for room rather than for others' prompts, and drafting may give them some.
LONGEST_S = 10.0


class PrefillPressure:
    """Counts requests whose prompts the verifier has still to read.

    A pass that reads a prompt starts at once, without those who wait for their drafts; and drafters that read prompts
    of newcomers meanwhile, dear work that comes before anybody's draft, keep a shared machine from the verifier.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Our own requests', and sequences that wait at the verifier, those of others among them, when it last told.
        self.num_unread = 0
        self.num_queued = 0
        self._crowded_since_s: float | None = None

    def is_crowded(self) -> bool:
        """Whether there are more than a few prompts, or some are left of so many."""
        num_waiting = self.num_unread if self.num_unread > self.num_queued else self.num_queued
        if num_waiting == 0 or (num_waiting <= FEW_PROMPTS and not self._is_fresh()):
            self._crowded_since_s = None
            return False
        if num_waiting > FEW_PROMPTS and self._crowded_since_s is None:
            self._crowded_since_s = self._clock()
        return self._is_fresh()

    def _is_fresh(self) -> bool:
        return self._crowded_since_s is not None and self._clock() - self._crowded_since_s <= LONGEST_S
