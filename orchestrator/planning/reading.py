"""Whether the verifier has many prompts to read: then nobody begins to draft, and no round waits."""

from __future__ import annotations

from collections.abc import Callable

# So many prompts at a time are read on the side.
FEW_PROMPTS = 4
# Sequences that wait longer than this wait for room rather than for others' prompts, and drafting may give them some.
LONGEST_S = 4.0


class Reading:
    """Counts requests whose prompts the verifier has still to read.

    A pass that reads a prompt starts at once, without those who wait for their drafts; and drafters that read prompts
    of newcomers meanwhile, dear work that comes before anybody's draft, keep a shared machine from the verifier.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.num_unread = 0
        self._crowded_since_s: float | None = None

    def is_crowded(self, num_queued: int) -> bool:
        """Whether many prompts wait to be read; `num_queued` sequences wait at the verifier, others' among them."""
        if max(self.num_unread, num_queued) <= FEW_PROMPTS:
            self._crowded_since_s = None
            return False
        if self._crowded_since_s is None:
            self._crowded_since_s = self._clock()
        return self._clock() - self._crowded_since_s <= LONGEST_S
