"""Which outcomes belong to one pass, and what lay between passes."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.planner.cost_model import PassSample
from orchestrator.request.rounds import Outcome


class PassLog:
    """Puts the outcomes of one verifier together to passes, by what they say of theirs and by when they come.

    An outcome begins a pass if its request had one in the last pass already, or if it says another number of rows or
    another time. `AdaptivePlanner.round_over` asks that, and counts, in place: it is done for every round.

    It knows the rounds of this orchestrator only; another one's are rows of the pass like those of prompts.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Of the pass that goes on; whoever takes a round in adds to the counts.
        self.pass_number = 0
        self.pass_rows = self.pass_us = 0
        self.num_rounds = 0
        self.num_asked = 0
        self.num_first = 0
        self.num_tokens = 0
        self.context = 0
        self._ended_s = 0.0
        self._gap_s: float | None = None
        self._was_idle = True

    def idle(self) -> None:
        """No sequence runs now, so that the time until the next pass tells nothing."""
        self._was_idle = True

    def begin(self, outcome: Outcome) -> PassSample | None:
        """A pass begins, of which this is the first outcome; returns the one before, if there was one."""
        record = self._record()
        now_s = self._clock()
        gap_s = max(0.0, now_s - self._ended_s - outcome.pass_us / 1e6)
        self._gap_s = None if self._was_idle else gap_s
        self._was_idle = False
        self._ended_s = now_s
        self.pass_number += 1
        self.pass_rows, self.pass_us = outcome.pass_rows, outcome.pass_us
        self.num_rounds = self.num_asked = self.num_first = self.num_tokens = self.context = 0
        return record

    def _record(self) -> PassSample | None:
        if self.num_rounds == 0:
            return None
        return PassSample(
            self.num_rounds,
            self.num_asked,
            self.num_tokens,
            self.pass_rows,
            self.context,
            self.pass_us / 1e6,
            self._gap_s,
            self.num_first > 0,
        )
