"""What a drafter counts for operators."""

from __future__ import annotations

from coppice.obs.metrics import histogram

SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
NODES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
# Statuses that sequences fail with: counted from the start, so that operators see a 0.
USUAL_FAILURES = ("already_exists", "internal", "invalid_argument", "not_found", "resource_exhausted", "unimplemented")


class DrafterCounts:
    """Each is written by one thread alone, the event loop or the model's, and may be read by any."""

    def __init__(self) -> None:
        # The event loop's: sequences so far, and those that were refused or failed later, by the name of the status.
        self.num_opened = 0
        # Tokens that they began with.
        self.num_prompt_tokens = 0
        self.failed = dict.fromkeys(USUAL_FAILURES, 0)
        # Expectations for sequences that were gone.
        self.num_gone = 0
        # The model thread's.
        self.queue_s = histogram("coppice_drafter_queue_seconds", "Time that a draft waited for the model.", SECONDS)
        self.draft_s = histogram(
            "coppice_drafter_draft_seconds", "Time of a draft, from its turn on, the reading included.", SECONDS
        )
        self.nodes = histogram("coppice_drafter_draft_nodes", "Nodes of a draft.", NODES)
        # Expectations that were drafted ahead for, and those that were not: more was committed, or it is switched off.
        self.num_expected = 0
        self.num_dropped = 0
        # Trees that were sent behind likely outcomes.
        self.num_ahead = 0

    def drafted(self, queue_s: float, draft_s: float, num_nodes: int) -> None:
        """A draft was sent."""
        self.queue_s.observe(queue_s)
        self.draft_s.observe(draft_s)
        self.nodes.observe(num_nodes)

    def count_failure(self, status: str) -> None:
        """A sequence was refused, or dropped from; `status` is the name of its error's, in lower case."""
        self.failed[status] = self.failed.get(status, 0) + 1
