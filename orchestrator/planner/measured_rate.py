"""Tokens per second of all requests, as measured: what every prediction has to stand up to."""

from __future__ import annotations

from orchestrator.planner.cost_model import PassSample

# Weight of a pass, and the passes before there is anything to tell.
_RATE = 0.05
_FEWEST_PASSES = 3
_FEWEST_DRAFTED_ROUNDS = 12
# A pass counts as at most this many usual ones.
_OUTLIER = 3.0
# A number of requests that differs by more than this share is another load, of which nothing is known yet.
_SAME_LOAD = 0.25
# A pass that lacks more than the rest of the running requests, which wait for drafts, is no plain one.
FULL_SHARE = 0.9


class MeasuredRate:
    """A running mean over passes of one kind, of one load."""

    def __init__(self, fewest_rounds: int = 0) -> None:
        """Rounds that accept drafts vary so much that one may have to see `fewest_rounds` of them."""
        self._fewest_rounds = fewest_rounds
        self._load = 0
        self._num_passes = self._num_rounds = 0
        self._tokens = self._seconds = self._weight = 0.0

    def forget(self) -> None:
        """Begin anew."""
        self._load = self._num_passes = self._num_rounds = 0
        self._tokens = self._seconds = self._weight = 0.0

    def tokens_per_s(self, num_running: int) -> float | None:
        """None while too few passes with about so many requests were seen."""
        if not self._is_load(num_running) or self._num_passes < _FEWEST_PASSES:
            return None
        return self._tokens / self._seconds if self._num_rounds >= self._fewest_rounds else None

    def add(self, record: PassSample, num_running: int) -> None:
        """Take a pass in, unless the verifier may have been idle before it."""
        if record.gap_s is None:
            return
        if not self._is_load(num_running):
            self.forget()
            self._load = num_running
        seconds = record.pass_s + record.gap_s
        if self._num_passes >= _FEWEST_PASSES:
            seconds = min(seconds, _OUTLIER * self._seconds / self._weight)
        self._tokens += record.num_tokens - _RATE * self._tokens
        self._seconds += seconds - _RATE * self._seconds
        self._weight += 1 - _RATE * self._weight
        self._num_passes += 1
        self._num_rounds += record.num_rounds

    def _is_load(self, num_running: int) -> bool:
        return abs(num_running - self._load) <= _SAME_LOAD * self._load


class MeasuredRates:
    """Rates of all passes, of those for which nobody drafts, and of those for which everybody does."""

    def __init__(self) -> None:
        self.all = MeasuredRate()
        self.plain = MeasuredRate()
        self.joint = MeasuredRate(_FEWEST_DRAFTED_ROUNDS)
        self._last: MeasuredRate | None = None

    def plain_of_one(self, num_running: int) -> float:
        """Tokens per second of each of so many requests for which nobody drafts; 0 while there is nothing to tell."""
        return (self.plain.tokens_per_s(num_running) or 0.0) / max(1, num_running)

    def add(self, record: PassSample, num_running: int, is_settled: bool, ran_as_planned: bool) -> None:
        """Take a pass in; one of another kind than the one before, or that did not run as planned, is neither."""
        self.all.add(record, num_running)
        kind = None
        if record.num_asked == 0 and record.num_rounds >= FULL_SHARE * num_running:
            kind = self.plain
        elif record.is_joint and is_settled:
            kind = self.joint
        if kind is not None and kind is self._last and ran_as_planned:
            kind.add(record, num_running)
        self._last = kind
