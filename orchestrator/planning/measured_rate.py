"""Tokens per second of all requests, as measured lately."""

from __future__ import annotations

from orchestrator.planning.cost_model import PassRecord

# Weight of a pass, and the passes before there is anything to tell.
_RATE = 0.05
_FEWEST_PASSES = 8
# A batch that has changed by more than this share is another load, of which nothing is known yet.
_SAME_LOAD = 0.5


class MeasuredRate:
    """A running mean that begins anew when the load changes."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._num_rounds = 0
        self._num_passes = 0

    @property
    def tokens_per_s(self) -> float:
        """0 while there are too few passes to tell."""
        return self._tokens / self._seconds if self._num_passes >= _FEWEST_PASSES else 0.0

    def add(self, record: PassRecord) -> None:
        """Take a pass in, unless the verifier may have been idle before it."""
        if record.gap_s is None:
            return
        if abs(record.num_rounds - self._num_rounds) > _SAME_LOAD * self._num_rounds:
            self._tokens = self._seconds = 0.0
            self._num_passes, self._num_rounds = 0, record.num_rounds
        self._tokens += record.num_tokens - _RATE * self._tokens
        self._seconds += record.pass_s + record.gap_s - _RATE * self._seconds
        self._num_passes += 1
