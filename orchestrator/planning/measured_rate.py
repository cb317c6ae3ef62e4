"""Tokens per second of all requests, as measured: what every prediction has to stand up to."""

from __future__ import annotations

from orchestrator.planning.cost_model import PassRecord

# Weight of a pass, and the passes before there is anything to tell.
_RATE = 0.05
_FEWEST_PASSES = 4
# A number of requests that differs by more than this share is another load, of which nothing is known yet.
_SAME_LOAD = 0.25


class MeasuredRate:
    """A running mean over passes of one kind, of one load."""

    def __init__(self) -> None:
        self._load = 0
        self._num_passes = 0
        self._tokens = self._seconds = 0.0

    def forget(self) -> None:
        """Begin anew."""
        self._load = self._num_passes = 0

    def tokens_per_s(self, num_running: int) -> float | None:
        """None while too few passes with about so many requests were seen."""
        is_known = self._is_load(num_running) and self._num_passes >= _FEWEST_PASSES
        return self._tokens / self._seconds if is_known else None

    def add(self, record: PassRecord, num_running: int) -> None:
        """Take a pass in, unless the verifier may have been idle before it."""
        if record.gap_s is None:
            return
        if not self._is_load(num_running):
            self._load, self._num_passes = num_running, 0
            self._tokens = self._seconds = 0.0
        self._tokens += record.num_tokens - _RATE * self._tokens
        self._seconds += record.pass_s + record.gap_s - _RATE * self._seconds
        self._num_passes += 1

    def _is_load(self, num_running: int) -> bool:
        return abs(num_running - self._load) <= _SAME_LOAD * self._load


class MeasuredRates:
    """Rates of all passes, of those for which nobody drafts, and of those for which everybody does."""

    def __init__(self) -> None:
        self.all = MeasuredRate()
        self.plain = MeasuredRate()
        self.joint = MeasuredRate()
        self._last: MeasuredRate | None = None

    def add(self, record: PassRecord, num_running: int, is_settled: bool) -> None:
        """Take a pass in; one of another kind than the one before is neither."""
        self.all.add(record, num_running)
        kind = None
        if record.num_asked == 0:
            kind = self.plain
        elif record.is_joint and is_settled:
            kind = self.joint
        if kind is not None and kind is self._last:
            kind.add(record, num_running)
        self._last = kind
