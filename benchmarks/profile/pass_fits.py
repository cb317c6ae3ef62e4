"""From passes that were seen in service to what passes cost. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.contenders import BenchmarkError
from benchmarks.profile.calibration import Calibration, fit, observations, work_of
from benchmarks.profile.records import PassRecord
from benchmarks.profile.timeline import Timeline
from simulator.machine import Curve, PassWork, VerifierCosts

# Where the straight lines of a pass's time by its rows meet, as far as passes had so many.
KNEES = (4, 16, 64, 256)
# A pass that a drafter worked beside for less of its time than this counts as one without.
ALONE = 0.02
# Deviations of a normal distribution in units of the median absolute one.
_NORMAL = 1.4826


@dataclass(frozen=True, slots=True)
class PassFit:
    """Costs of a verifier; what a second of drafting beside a pass adds to it; and how much else passes vary."""

    costs: VerifierCosts
    pass_per_draft: float
    noise: float


def fit_passes(loads: Sequence[Calibration], row_multiple: int, max_nodes: int) -> PassFit:
    """Passes without drafting beside them tell what they cost by themselves, the others what drafting adds.

    Raises:
        BenchmarkError: there are too few passes to tell anything.
    """
    drafting = [Timeline((one.started_s, one.ended_s) for one in load.records.drafts) for load in loads]
    alone = [
        [one for one in load.records.passes if _share_beside(one, busy) < ALONE]
        for load, busy in zip(loads, drafting, strict=True)
    ]
    if not any(alone):
        raise BenchmarkError("no pass ran without drafting beside it: too few loads to tell what passes cost")
    costs = _costs(loads, alone, row_multiple, max_nodes)
    more_s = busy_s = 0.0
    for load, busy in zip(loads, drafting, strict=True):
        for one in load.records.passes:
            beside_s = busy.within(one.started_s, one.ended_s)
            if beside_s >= ALONE * one.pass_s:
                more_s += one.pass_s - costs.pass_s(work_of(one))
                busy_s += beside_s
    errors = [abs(math.log(one.pass_s / costs.pass_s(work_of(one)))) for passes in alone for one in passes]
    pass_per_draft = max(0.0, more_s / busy_s) if busy_s else 0.0
    return PassFit(costs, round(pass_per_draft, 4), round(_NORMAL * statistics.median(errors), 4))


def _costs(
    loads: Sequence[Calibration], alone: Sequence[Sequence[PassRecord]], row_multiple: int, max_nodes: int
) -> VerifierCosts:
    most = max(one.rows for passes in alone for one in passes)
    knees = [knee for knee in KNEES if knee < most] or [1]
    num_features = 4 + 1 + len(knees)
    found = fit(
        [
            observations(
                [_features(work_of(one), knees, row_multiple) for one in passes],
                [one.pass_s for one in passes],
                num_features,
            )
            for passes in alone
        ]
    )
    sequence_s, round_row_s, prompt_s, context_s, least_s, *slopes = map(float, found)
    ends = [*knees[1:], max(most, knees[-1] + 1)]
    seconds = [least_s]
    for slope, low, high in zip(slopes, knees, ends, strict=True):
        seconds.append(seconds[-1] + slope * (high - low))
    gap_s, gap_sequence_s, gap_token_s = map(float, _after(loads))
    start_s, start_sequence_s = map(float, _before(loads))
    return VerifierCosts(
        Curve((knees[0], *ends), tuple(seconds)),
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


def _features(work: PassWork, knees: Sequence[int], row_multiple: int) -> list[float]:
    """What `VerifierCosts.pass_s` adds up, so that a coefficient is a cost; of rows, those between two knees."""
    rows = -(-work.rows // row_multiple) * row_multiple
    ends = [*knees[1:], math.inf]
    parts = [min(max(0.0, rows - low), high - low) for low, high in zip(knees, ends, strict=True)]
    return [max(0, work.num_rounds - 1), work.round_rows, work.prompt_rows, work.context_rows, 1.0, *parts]


def _after(loads: Sequence[Calibration]) -> Sequence[float]:
    """From the end of a pass to when its outcomes are on their way, by rounds and tokens."""
    groups = []
    for load in loads:
        passes = [one for one in load.records.passes if one.rounds]
        groups.append(
            observations(
                [[1.0, len(one.rounds), sum(each.num_committed for each in one.rounds)] for one in passes],
                [one.delivered_s - one.ended_s for one in passes],
                3,
            )
        )
    return list(fit(groups))


def _before(loads: Sequence[Calibration]) -> Sequence[float]:
    """From there to the next pass where nothing waits for drafts, by sequences."""
    groups = []
    for load in loads:
        pairs = [] if load.speculates else list(load.next_passes)
        groups.append(
            observations(
                [[1.0, len(second.rounds)] for _, second in pairs],
                [second.started_s - first.delivered_s for first, second in pairs],
                2,
            )
        )
    return list(fit(groups))


def _share_beside(one: PassRecord, drafting: Timeline) -> float:
    return drafting.within(one.started_s, one.ended_s) / one.pass_s
