"""Records of services under load, from the timelines that they keep, and costs fitted to them. Pure."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.simulator.machine import Curve, DrafterCosts, OrchestratorCosts, PassWork, VerifierCosts
from coppice.obs.timeline import TimelineEvent


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One sequence's round in a pass: where it began, what it committed, and the draft nodes that it verified."""

    request_id: str
    base_length: int
    num_committed: int
    num_nodes: int

    @property
    def length(self) -> int:
        """Tokens committed when it was over."""
        return self.base_length + self.num_committed


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One pass: the model computed from `started_s` to `ended_s`, and outcomes were on their way at `delivered_s`.

    `rounds` are those that ended with it, in the order in which they were told; other rows are a prompt's.
    """

    started_s: float
    ended_s: float
    delivered_s: float
    rows: int
    rounds: tuple[RoundRecord, ...]

    @property
    def pass_s(self) -> float:
        return self.ended_s - self.started_s


@dataclass(frozen=True, slots=True)
class OpeningRecord:
    """A request's sequence was opened at the verifier."""

    request_id: str
    at_s: float


@dataclass(frozen=True, slots=True)
class TreeRecord:
    """A tree with nodes came to the verifier."""

    request_id: str
    base_length: int
    at_s: float


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """A draft after so many tokens, of which `num_new` came since the last one: asked for, begun, ended."""

    request_id: str
    base_length: int
    num_new: int
    asked_s: float
    started_s: float
    ended_s: float
    num_nodes: int


@dataclass(frozen=True, slots=True)
class CpuRecord:
    """The CPU time that the orchestrator's process had taken by then, in seconds."""

    at_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Records:
    """Of one topology's services, each kind in order of time."""

    passes: tuple[PassRecord, ...]
    openings: tuple[OpeningRecord, ...]
    trees: tuple[TreeRecord, ...]
    drafts: tuple[DraftRecord, ...]
    cpu: tuple[CpuRecord, ...]

    def within(self, start_s: float, end_s: float) -> Records:
        """Those that began in a part of the time."""
        return Records(
            tuple(one for one in self.passes if start_s <= one.started_s < end_s),
            tuple(one for one in self.openings if start_s <= one.at_s < end_s),
            tuple(one for one in self.trees if start_s <= one.at_s < end_s),
            tuple(one for one in self.drafts if start_s <= one.started_s < end_s),
            tuple(one for one in self.cpu if start_s <= one.at_s < end_s),
        )


def records_of(
    verifier: Sequence[TimelineEvent], drafter: Sequence[TimelineEvent], cpu: Sequence[CpuRecord]
) -> Records:
    """Records of one stream of each service, of which events are named as `StreamTimeline` does."""
    passes: list[PassRecord] = []
    rounds: list[list[RoundRecord]] = []
    openings, trees, names = [], [], dict[int, str]()
    # Passes that each sequence took part in and that have no outcome yet: parts of its prompt, and what is on its way.
    pending: dict[int, deque[int]] = defaultdict(deque)
    for event in sorted(verifier, key=lambda one: one.end_us):
        name, at_s = names.get(event.sequence, ""), event.at_us / 1e6
        match event.what:
            case "orchestrator.open.in":
                names[event.sequence] = event.request_id
                openings.append(OpeningRecord(event.request_id, at_s))
            case "orchestrator.draft.in" if event.size:
                trees.append(TreeRecord(name, event.base, at_s))
            case "pass":
                for sequence in event.sequences:
                    pending[sequence].append(len(passes))
                passes.append(PassRecord(at_s, event.end_us / 1e6, event.end_us / 1e6, event.size, ()))
                rounds.append([])
            case "orchestrator.outcome.out":
                number = pending[event.sequence].popleft()
                while pending[event.sequence] and abs(1e6 * passes[number].pass_s - event.pass_us) > 1:
                    number = pending[event.sequence].popleft()
                rounds[number].append(RoundRecord(name, event.base, event.size, event.num_verified))
                passes[number] = replace(passes[number], delivered_s=at_s)
    # The model may begin again before the last outcome of a pass is on its way.
    begins_s = [*(one.started_s for one in passes[1:]), math.inf]
    ended = zip(passes, rounds, begins_s, strict=True)
    return Records(
        tuple(replace(one, delivered_s=min(one.delivered_s, s), rounds=tuple(each)) for one, each, s in ended),
        tuple(openings),
        tuple(trees),
        tuple(_drafts(drafter)),
        tuple(cpu),
    )


def _drafts(drafter: Sequence[TimelineEvent]) -> Iterator[DraftRecord]:
    names, known, opened_s = dict[int, str](), dict[int, int](), dict[int, float]()
    heard_s: dict[tuple[int, int], float] = {}
    made: dict[int, TimelineEvent] = {}
    for event in sorted(drafter, key=lambda one: one.end_us):
        sequence, at_s = event.sequence, event.at_us / 1e6
        match event.what:
            case "orchestrator.open.in":
                names[sequence], known[sequence], opened_s[sequence] = event.request_id, 0, at_s
            case "orchestrator.outcome.in":
                heard_s[sequence, event.base + event.size] = at_s
            case "draft":
                made[sequence] = event
            case "orchestrator.tree.out" if sequence in made:
                draft, num_new = made.pop(sequence), event.base - known[sequence]
                asked_s = max(opened_s[sequence], heard_s.pop((sequence, event.base), 0.0))
                times = asked_s, draft.at_us / 1e6, draft.end_us / 1e6
                yield DraftRecord(names[sequence], event.base, num_new, *times, draft.size)
                known[sequence] = event.base


Floats: TypeAlias = NDArray[np.float64]

_SWEEPS = 5000
# Relative change of the coefficients below which they are found.
_ENOUGH = 1e-9


def nonnegative(features: Floats, values: Floats) -> Floats:
    """Coefficients [F] from 0 on that minimise |features [N, F] @ coefficients - values [N]|, one after another.

    A feature that is 0 throughout gets 0.
    """
    scales = np.linalg.norm(features, axis=0)
    scales[scales == 0] = 1.0
    scaled = features / scales
    gram, target = scaled.T @ scaled, scaled.T @ values
    found = np.zeros(features.shape[1])
    for _ in range(_SWEEPS):
        before = found.copy()
        for index in np.flatnonzero(np.diag(gram)):
            slope = target[index] - gram[index] @ found
            found[index] = max(0.0, found[index] + slope / gram[index, index])
        if np.abs(found - before).max(initial=0.0) <= _ENOUGH * np.abs(found).max(initial=0.0):
            break
    return np.asarray(found / scales)


class Timeline:
    """Stretches of time that do not overlap, seconds of one clock."""

    def __init__(self, stretches: Iterable[tuple[float, float]]) -> None:
        # Seconds in stretches before each border; they grow within a stretch alone.
        borders = np.array(sorted(stretches), float).reshape(-1, 2)
        lengths = np.diff(borders, axis=1)
        self._borders = np.concatenate(([0.0], borders.ravel()))
        self._before = np.concatenate(([0.0], np.cumsum(np.hstack([np.zeros_like(lengths), lengths]).ravel())))

    def within(self, start_s: float, end_s: float) -> float:
        """Seconds between two times, from 0 on, that lie in a stretch."""
        first, last = np.interp([start_s, end_s], self._borders, self._before)
        return float(last - first)


@dataclass(frozen=True, slots=True)
class Calibration:
    """One load: whether its requests asked for drafts, how many there were at once, and what services did meanwhile."""

    speculates: bool
    concurrency: int
    records: Records

    @property
    def next_passes(self) -> Iterator[tuple[PassRecord, PassRecord]]:
        """Passes and the ones after them that have a request in common, so that there was work all the while."""
        for first, second in pairwise(self.records.passes):
            if {one.request_id for one in first.rounds} & {one.request_id for one in second.rounds}:
                yield first, second


def work_of(one: PassRecord) -> PassWork:
    """What a pass computed. The row of a prompt's last token counts as its first round's."""
    round_rows = sum(1 + each.num_nodes for each in one.rounds)
    context_rows = sum((1 + each.num_nodes) * each.base_length for each in one.rounds)
    return PassWork(len(one.rounds), round_rows, max(0, one.rows - round_rows), context_rows)


# Of one load: what times depend on, [N, F], and the times, [N] in seconds.
Observations: TypeAlias = tuple[Floats, Floats]


def fit(groups: Sequence[Observations]) -> Floats:
    """Coefficients [F] from 0 on. Each load counts the same, by its relative errors, however many passes it had.

    All are 0 where no time was taken. Within a load all passes weigh the same, so that times add up to what was
    measured; medians would not.
    """
    known = [group for group in groups if len(group[1]) and group[1].mean() > 0]
    if not known:
        return np.zeros(groups[0][0].shape[1])
    weights = [1 / (seconds.mean() * len(seconds) ** 0.5) for _, seconds in known]
    features, seconds = (
        np.concatenate([weight * group[part] for weight, group in zip(weights, known, strict=True)]) for part in (0, 1)
    )
    return nonnegative(features, seconds)


def observations(pairs: Iterable[tuple[Sequence[float], float]], num_features: int) -> Observations:
    """From features and seconds, of which there may be none."""
    known = list(pairs)
    features = np.array([some for some, _ in known], float).reshape(len(known), num_features)
    return features, np.array([seconds for _, seconds in known], float)


# Where the straight lines of a pass's time by its rows meet, as far as passes had so many.
KNEES = (4, 16, 64, 256)
# While a drafter runs, a pass goes on, however slowly.
MOST_LOST = 0.95
# Deviations of a normal distribution in units of the median absolute one.
_NORMAL = 1.4826


@dataclass(frozen=True, slots=True)
class PassFit:
    """Costs of a verifier; what a second of drafting during a pass adds to it; and how much else passes vary."""

    costs: VerifierCosts
    pass_per_draft: float
    noise: float


def fit_passes(loads: Sequence[Calibration], row_multiple: int, max_nodes: int) -> PassFit:
    """All passes tell together what passes cost by themselves and what drafting during them adds.

    Raises BenchmarkError if there are too few passes to tell anything.
    """
    most = max((one.rows for load in loads for one in load.records.passes), default=0)
    if not most:
        raise BenchmarkError("no pass ran: too few loads to tell what passes cost")
    knees = [knee for knee in KNEES if knee < most] or [1]
    observed = [_observed_passes(load, knees, row_multiple) for load in loads]
    found = fit(observed)
    pass_per_draft, sequence_s, round_row_s, prompt_s, context_s, least_s, *slopes = map(float, found)
    ends = [*knees[1:], max(most, knees[-1] + 1)]
    seconds = [least_s]
    for slope, low, high in zip(slopes, knees, ends, strict=True):
        seconds.append(seconds[-1] + slope * (high - low))
    gap_s, gap_sequence_s, gap_token_s = map(float, fit([observations(_outcomes(load), 3) for load in loads]))
    start_s, start_sequence_s = map(float, _before(loads))
    costs = VerifierCosts(
        Curve((knees[0], *ends), tuple(round(one, 7) for one in seconds)),
        context=0,
        row_context_s=context_s,
        sequence_s=sequence_s,
        round_row_s=round_row_s,
        prompt_token_s=prompt_s,
        gap_s=gap_s,
        gap_sequence_s=gap_sequence_s,
        gap_token_s=gap_token_s,
        start_s=start_s,
        start_sequence_s=start_sequence_s,
        row_multiple=row_multiple,
        max_nodes=max_nodes,
    )
    errors = np.concatenate([np.abs(np.log(seconds / (features @ found))) for features, seconds in observed])
    return PassFit(costs, round(min(pass_per_draft, MOST_LOST), 4), round(_NORMAL * float(np.median(errors)), 4))


def _observed_passes(load: Calibration, knees: Sequence[int], row_multiple: int) -> Observations:
    drafting = Timeline((one.started_s, one.ended_s) for one in load.records.drafts)
    passes = load.records.passes
    pairs = (
        ([drafting.within(one.started_s, one.ended_s), *_features(work_of(one), knees, row_multiple)], one.pass_s)
        for one in passes
    )
    return observations(pairs, 6 + len(knees))


def _features(work: PassWork, knees: Sequence[int], row_multiple: int) -> list[float]:
    """What `VerifierCosts.pass_s` adds up, so that a coefficient is a cost; of rows, those between two knees."""
    rows = -(-work.rows // row_multiple) * row_multiple
    ends = [*knees[1:], math.inf]
    parts = [min(max(0.0, rows - low), high - low) for low, high in zip(knees, ends, strict=True)]
    return [max(0, work.num_rounds - 1), work.round_rows, work.prompt_rows, work.context_rows, 1.0, *parts]


def _outcomes(load: Calibration) -> Iterator[tuple[Sequence[float], float]]:
    """From the end of a pass to when its outcomes are on their way, by rounds and tokens."""
    for one in load.records.passes:
        if one.rounds:
            tokens = sum(each.num_committed for each in one.rounds)
            yield [1.0, len(one.rounds), tokens], one.delivered_s - one.ended_s


def _before(loads: Sequence[Calibration]) -> Sequence[float]:
    """From there to the next pass where nothing waits for drafts, by sequences."""
    groups = [
        observations(
            (([1.0, len(second.rounds)], second.started_s - first.delivered_s) for first, second in load.next_passes), 2
        )
        for load in loads
        if not load.speculates
    ]
    return list(fit(groups))


# Drafts that tell anything, at least.
MIN_SAMPLES = 3
# A draft during which a pass ran for less of its time than this counts as one without.
ALONE = 0.02
# Least share of its speed that a drafter keeps while a pass runs, so that it comes to an end.
LEAST_SPEED = 0.01
# Tokens since the last draft beyond which a draft is one that has a prompt to read.
MOST_NEW = 32


@dataclass(frozen=True, slots=True)
class DraftFit:
    """Costs of a drafter by itself, and how many times as long drafts take while a pass runs."""

    costs: DrafterCosts
    draft_factor: float


def fit_drafts(loads: Sequence[Calibration]) -> DraftFit:
    """By nodes where no pass ran meanwhile; what the others took longer was lost to passes.

    Raises BenchmarkError if there are too few drafts to tell anything.
    """
    alone: list[list[DraftRecord]] = []
    beside: list[tuple[DraftRecord, float]] = []
    for load in loads:
        computing = Timeline((one.started_s, one.ended_s) for one in load.records.passes)
        alone.append([])
        for draft in load.records.drafts:
            pass_s = computing.within(draft.started_s, draft.ended_s)
            if pass_s < ALONE * _seconds(draft):
                alone[-1].append(draft)
            else:
                beside.append((draft, pass_s))
    usual = [[draft for draft in drafts if draft.num_new <= MOST_NEW] for drafts in alone]
    usual = [drafts for drafts in usual if len(drafts) >= MIN_SAMPLES]
    if not usual:
        raise BenchmarkError("hardly any draft was made between passes: too few loads to tell what drafts cost")
    curve = _curve(usual)
    reading = [draft for drafts in alone for draft in drafts if draft.num_new > MOST_NEW]
    new = sum(draft.num_new - 1 for draft in reading)
    read_s = sum(_seconds(draft) - curve.at(draft.num_nodes) for draft in reading)
    costs = DrafterCosts(curve, max(0.0, read_s / new) if new else 0.0)
    pass_s = sum(seconds for _, seconds in beside)
    lost_s = sum(_seconds(draft) - costs.draft_s(draft.num_nodes, _num_unread(draft)) for draft, _ in beside)
    lost = min(max(0.0, lost_s / pass_s), 1 - LEAST_SPEED) if pass_s else 0.0
    return DraftFit(costs, round(1 / (1 - lost), 4))


def _curve(loads: Sequence[Sequence[DraftRecord]]) -> Curve:
    """A straight line: budgets that nothing was fitted to lie beyond those that were."""
    groups = [observations((([1.0, draft.num_nodes], _seconds(draft)) for draft in drafts), 2) for drafts in loads]
    base_s, node_s = map(float, fit(groups))
    most = max(draft.num_nodes for drafts in loads for draft in drafts)
    return Curve((0, max(1, most)), (round(base_s, 7), round(base_s + node_s * max(1, most), 7)))


def _num_unread(draft: DraftRecord) -> int:
    """What it had to read but for one token. Of a few new ones its last tree had most; reading them is in the curve."""
    return draft.num_new if draft.num_new > MOST_NEW else 1


def _seconds(draft: DraftRecord) -> float:
    return draft.ended_s - draft.started_s


# Outcomes of one pass, of which it is looked at how they follow one another.
MIN_OUTCOMES = 4


@dataclass(frozen=True, slots=True)
class OrchestratorFit:
    """CPU seconds for an outcome, whatever it took for the request as a whole among them, and for a draft."""

    outcome_s: float
    draft_s: float
    # By the clock everything takes so many times as long, since others want the same cores.
    factor: float

    @property
    def ask_s(self) -> float:
        """Of what a draft takes, half is for asking and half for its tree: both ways take equally long."""
        return self.draft_s / 2


def fit_orchestrator(loads: Sequence[Calibration]) -> OrchestratorFit:
    """What outcomes and drafts took between a load's first and last look at the clock of the process.

    How long messages wait for one another tells little of this: their peers take their time, too. Where there is one
    request at a time, each message wakes the process, which then takes a multiple of what it takes among others; such
    loads count only where there are no others.
    """
    fewest = min(load.concurrency for load in loads)
    many = [load for load in loads if load.concurrency > fewest] or loads
    outcome_s, draft_s = map(float, fit([_observed_cpu(load) for load in many]))
    return OrchestratorFit(outcome_s, draft_s, max(1.0, _factor(many, outcome_s, draft_s / 2)))


def _factor(loads: Sequence[Calibration], outcome_s: float, ask_s: float) -> float:
    """Time in which a pass's outcomes became questions to drafters, by the work of these and of trees between them."""
    taken_s = work_s = 0.0
    for load in loads:
        asked_s = {(one.request_id, one.base_length): one.asked_s for one in load.records.drafts}
        trees_s = [one.at_s for one in load.records.trees]
        for one in load.records.passes:
            at_s = sorted(asked_s.get((each.request_id, each.length), -math.inf) for each in one.rounds)
            # Some are not asked afterwards, or were before.
            if len(at_s) < MIN_OUTCOMES or at_s[0] < one.ended_s:
                continue
            num_trees = bisect_left(trees_s, at_s[-1]) - bisect_left(trees_s, at_s[0])
            taken_s += at_s[-1] - at_s[0]
            work_s += (len(at_s) - 1) * (outcome_s + ask_s) + num_trees * ask_s
    return taken_s / work_s if work_s > 0 else 1.0


def _observed_cpu(load: Calibration) -> Observations:
    if len(load.records.cpu) < 2:
        return observations([], 2)
    first, last = load.records.cpu[0], load.records.cpu[-1]
    between = load.records.within(first.at_s, last.at_s)
    outcomes = sum(len(one.rounds) for one in between.passes)
    return observations([([outcomes, len(between.trees)], last.cpu_s - first.cpu_s)], 2)


@dataclass(frozen=True, slots=True)
class MessageFit:
    """Seconds of a message from one service to the next, and what the orchestrator takes for one.

    On these cores it takes `orchestrator_factor` times as long as on cores of its own.
    """

    message_s: float
    orchestrator: OrchestratorCosts
    orchestrator_factor: float


def fit_messages(loads: Sequence[Calibration], after_s: float) -> MessageFit:
    """Messages where there are the fewest requests at once, so that few wait for others.

    An outcome's way to the drafter is two messages and the orchestrator's work for it; so is a tree's way back.
    `after_s`: from the end of one request's pass to when its outcome is on its way.
    """
    work = fit_orchestrator(loads)
    few = min((load.concurrency for load in loads if load.speculates), default=0)
    quiet = [load for load in loads if load.speculates and load.concurrency == few]
    outcome_s, ask_s = work.factor * work.outcome_s, work.factor * work.ask_s
    there = [delay - outcome_s - ask_s for load in quiet for delay in _outcome_delays(load)]
    back = [delay - ask_s for load in quiet for delay in _tree_delays(load)]
    ways = [max(0.0, statistics.median(delays) / 2) for delays in (there, back) if delays]
    message_s = statistics.fmean(ways) if ways else 0.0
    fewest = min(load.concurrency for load in loads)
    turns = [seconds for load in loads if load.concurrency == fewest for seconds in _turnarounds(load)]
    known_s = after_s + message_s + outcome_s
    turnaround_s = max(0.0, statistics.fmean(turns) - known_s) if turns else 0.0
    costs = OrchestratorCosts(work.outcome_s, work.ask_s, work.ask_s, turnaround_s)
    return MessageFit(message_s, costs, round(work.factor, 4))


def _outcome_delays(load: Calibration) -> list[float]:
    """From when outcomes were on their way to when the drafter was asked after them."""
    asked_s = {(one.request_id, one.base_length): one.asked_s for one in load.records.drafts}
    delays = []
    for one in load.records.passes:
        for each in one.rounds:
            at_s = asked_s.get((each.request_id, each.length))
            # One that was asked for before, and has taken this outcome in, tells nothing.
            if at_s is not None and at_s > one.ended_s:
                delays.append(max(0.0, at_s - one.delivered_s))
    return delays


def _tree_delays(load: Calibration) -> list[float]:
    """From the end of a draft to when its tree was at the verifier."""
    ended_s = {(one.request_id, one.base_length): one.ended_s for one in load.records.drafts}
    delays = []
    for one in load.records.trees:
        at_s = ended_s.get((one.request_id, one.base_length))
        if at_s is not None and one.at_s > at_s:
            delays.append(one.at_s - at_s)
    return delays


def _turnarounds(load: Calibration) -> list[float]:
    """From the end of a request's last pass to the next request's opening; of so few at once that it is the next."""
    ended_s = {each.request_id: one.ended_s for one in load.records.passes for each in one.rounds}
    ends, opens = sorted(ended_s.values()), [one.at_s for one in load.records.openings]
    following = [(end, next((at for at in opens if at > end), None)) for end in ends]
    return [at - end for end, at in following if at is not None]
