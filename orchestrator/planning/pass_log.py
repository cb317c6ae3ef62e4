"""Which outcomes belong to one pass, and what lay between passes."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.planning.cost_model import PassRecord
from orchestrator.rounds import Outcome


class PassLog:
    """Puts the outcomes of one verifier together to passes, by what they say of theirs and by when they come.

    It knows the rounds of this orchestrator only; another one's are rows of the pass like those of prompts.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.pass_number = 0
        self._pass_rows = self._pass_us = 0
        self._num_rounds = 0
        self._num_asked = 0
        self._num_tokens = 0
        self._context = 0
        self._ended_s = 0.0
        self._gap_s: float | None = None
        self._was_idle = True

    def idle(self) -> None:
        """No sequence runs now, so that the time until the next pass tells nothing."""
        self._was_idle = True

    def add(self, outcome: Outcome, last_pass: int, asked: bool) -> PassRecord | None:
        """Take in the outcome of a request whose last round was in `last_pass`; returns the pass before, if it is new.

        `asked` says whether drafters had been asked for this round.
        """
        record = None
        if last_pass == self.pass_number or self._pass_us != outcome.pass_us or self._pass_rows != outcome.pass_rows:
            record = self._begin(outcome)
        self._num_rounds += 1
        self._num_asked += asked
        self._num_tokens += len(outcome.token_ids)
        self._context += outcome.base_length
        return record

    def _begin(self, outcome: Outcome) -> PassRecord | None:
        record = self._record()
        now_s = self._clock()
        gap_s = max(0.0, now_s - self._ended_s - outcome.pass_us / 1e6)
        self._gap_s = None if self._was_idle else gap_s
        self._was_idle = False
        self._ended_s = now_s
        self.pass_number += 1
        self._pass_rows, self._pass_us = outcome.pass_rows, outcome.pass_us
        self._num_rounds = self._num_asked = self._num_tokens = self._context = 0
        return record

    def _record(self) -> PassRecord | None:
        if self._num_rounds == 0:
            return None
        return PassRecord(
            self._num_rounds,
            self._num_asked,
            self._num_tokens,
            self._pass_rows,
            self._context,
            self._pass_us / 1e6,
            self._gap_s,
        )
