"""Passes of one verifier: reconstructed from outcomes, tested for running as planned, and measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.request.rounds import Outcome

# Waits below this share of a pass are negligible.
_NOTICEABLE = 0.1
# Weight of a pass in running means, and least passes and rounds before they are used.
_RATE = 0.05
_FEWEST_PASSES = 3
_FEWEST_DRAFTED_ROUNDS = 12
# Upper bound of a pass's weight, in mean passes.
_OUTLIER = 3.0
# Relative change of the number of requests that makes measurements obsolete.
_SAME_LOAD = 0.25
# Least share of running requests in a pass that counts as plain; the rest wait for drafts.
FULL_SHARE = 0.9
# Least share of asking rounds in a joint pass.
JOINT_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class PassSample:
    """One pass: its sequences, those that had asked for drafts, committed tokens, and rows.

    `context` is the sum of the sequences' committed lengths. `gap_s` is the time between the end of the previous pass
    and the start of this one: lingering, messages, drafters' CPU time. None if the verifier may have been idle.
    `reads_prompt`: a prompt's prefill ended in it, so that most rows are not rounds'.
    """

    num_rounds: int
    num_asked: int
    num_tokens: int
    num_rows: int
    context: int
    pass_s: float
    gap_s: float | None
    reads_prompt: bool = False

    @property
    def is_joint(self) -> bool:
        """Whether nearly all sequences had asked, so that the pass waited for drafts."""
        return self.num_asked >= JOINT_SHARE * self.num_rounds


class PassLog:
    """Groups outcomes of one verifier into passes.

    An outcome begins a pass if its request had a round in the current one, or if its rows or time differ.
    `AdaptivePlanner.round_over` tests this, and adds to the counts in place, since it runs for every round. Only rounds
    of this orchestrator are known; another's are rows of the pass like prompts'.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Of the current pass; its caller adds to the counts.
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
        """No sequence is running: the gap before the next pass carries no information."""
        self._was_idle = True

    def begin(self, outcome: Outcome) -> PassSample | None:
        """Begin a pass with its first outcome; returns the previous one, if any."""
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


class PlanLagFilter:
    """Separates passes that ran as planned from those after a switch of drafting on or off.

    A waiting round waits until the verifier hears of the switch. A pass runs as planned if its predecessor ended at
    least one round trip after the switch; a small deficit is ignored, since it bounds the excess wait.
    """

    def __init__(self) -> None:
        self._was_drafting: bool | None = None
        # Since the outcome that switched the plan.
        self._since_s = 0.0

    def pass_over(self, record: PassSample, way_s: float) -> bool:
        """Count a pass; returns whether it ran as planned, given a round trip of `way_s` to the verifier.

        Passes with both asking and other rounds, or with prefill, leave the state unchanged.
        """
        is_mixed = record.reads_prompt or (record.num_asked > 0 and not record.is_joint)
        is_drafting = record.num_asked > 0
        if not is_mixed and is_drafting != self._was_drafting:
            self._was_drafting, self._since_s = is_drafting, 0.0
        since_s = self._since_s
        self._since_s += record.pass_s + (record.gap_s or 0.0)
        return is_mixed or way_s - since_s <= _NOTICEABLE * record.pass_s


class MeasuredRate:
    """Running mean of tokens per second over passes of one kind, at one load."""

    def __init__(self, fewest_rounds: int = 0) -> None:
        """Drafted rounds vary, so they need at least `fewest_rounds`."""
        self._fewest_rounds = fewest_rounds
        self._load = 0
        self._num_passes = self._num_rounds = 0
        self._tokens = self._seconds = self._weight = 0.0

    def forget(self) -> None:
        """Reset."""
        self._load = self._num_passes = self._num_rounds = 0
        self._tokens = self._seconds = self._weight = 0.0

    def tokens_per_s(self, num_running: int) -> float | None:
        """Rate at about this load; None with too few passes."""
        if not self._is_load(num_running) or self._num_passes < _FEWEST_PASSES:
            return None
        return self._tokens / self._seconds if self._num_rounds >= self._fewest_rounds else None

    def add(self, record: PassSample, num_running: int) -> None:
        """Add a pass, unless the verifier may have been idle before it."""
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
    """Rates of all passes, of passes without drafts, and of joint ones."""

    def __init__(self) -> None:
        self.all = MeasuredRate()
        self.plain = MeasuredRate()
        self.joint = MeasuredRate(_FEWEST_DRAFTED_ROUNDS)
        self._last: MeasuredRate | None = None

    def plain_of_one(self, num_running: int) -> float:
        """Tokens per second per request without drafts, at this load; 0 if unknown."""
        return (self.plain.tokens_per_s(num_running) or 0.0) / max(1, num_running)

    def add(self, record: PassSample, num_running: int, is_settled: bool, ran_as_planned: bool) -> None:
        """Add a pass to all passes, and to its kind if the previous pass was of that kind and it ran as planned."""
        self.all.add(record, num_running)
        kind = None
        if record.num_asked == 0 and record.num_rounds >= FULL_SHARE * num_running:
            kind = self.plain
        elif record.is_joint and is_settled:
            kind = self.joint
        if kind is not None and kind is self._last and ran_as_planned:
            kind.add(record, num_running)
        self._last = kind
