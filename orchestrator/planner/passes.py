"""Passes of one verifier: put together from outcomes, whether they ran as planned, and tokens per second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.request.rounds import Outcome

# A wait of this share of a pass does not show.
_NOTICEABLE = 0.1
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
# A pass waits for drafts where at least this share of its rounds do.
JOINT_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class PassSample:
    """One pass: of how many sequences it was a round, of these how many had asked for drafts, the tokens that it
    committed, and its rows in all.

    `context` is the committed tokens of those sequences together. `gap_s` is the time since the pass before it ended
    that was not spent in the pass itself: lingering, messages, the drafters' share of the machine. None where the
    verifier may have been idle. `reads_prompt` says whether a prompt ended in it, most of whose rows are not rounds'.
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
        """Whether about everyone had asked for drafts, so that the pass waited for all of them."""
        return self.num_asked >= JOINT_SHARE * self.num_rounds


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


class PlanLagFilter:
    """Tells passes that ran as planned from those after a change from drafting to not drafting, or back.

    A round that has begun to wait goes on waiting until the verifier hears that it is not to. So a pass is what was
    planned once the one before it had ended as long after the change as a message takes there and an outcome back. One
    that lacks little of that can have waited that little longer than it was to.
    """

    def __init__(self) -> None:
        self._was_drafting: bool | None = None
        # Since the outcome with which what is planned changed.
        self._since_s = 0.0

    def pass_over(self, record: PassSample, way_s: float) -> bool:
        """A pass has ended; whether it ran as planned, if it takes so long to the verifier and back.

        Passes in which some ask and some do not, or prompts end, change nothing.
        """
        is_mixed = record.reads_prompt or (record.num_asked > 0 and not record.is_joint)
        is_drafting = record.num_asked > 0
        if not is_mixed and is_drafting != self._was_drafting:
            self._was_drafting, self._since_s = is_drafting, 0.0
        since_s = self._since_s
        self._since_s += record.pass_s + (record.gap_s or 0.0)
        return is_mixed or way_s - since_s <= _NOTICEABLE * record.pass_s


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
