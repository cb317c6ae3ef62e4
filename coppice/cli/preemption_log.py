"""Preemptions, as a verifier's log tells of them."""

from __future__ import annotations

import re

# What the scheduler says of a sequence that has ended.
_PREEMPTED = re.compile(r"sequence \d+ of stream \d+ was preempted (\d+) times")


class PreemptionLog:
    """Counts how often sequences that have ended had to make room for others."""

    def __init__(self) -> None:
        self.num_preemptions = 0

    def read(self, line: str) -> None:
        """Take a line of the log."""
        if found := _PREEMPTED.search(line):
            self.num_preemptions += int(found[1])
