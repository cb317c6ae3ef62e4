"""From passes that were seen in service to what passes cost. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coppice.lab.bench.contenders import BenchmarkError
from coppice.lab.bench.profile.calibration import Calibration, Observations, fit, observations, work_of
from coppice.lab.bench.profile.timeline import Timeline
from coppice.lab.simulator.machine import Curve, PassWork, VerifierCosts

# Where the straight lines of a pass's time by its rows meet, as far as passes had so many.
KNEES = (4, 16, 64, 256)
# Beside a drafter a pass goes on, however slowly.
MOST_LOST = 0.95
# Deviations of a normal distribution in units of the median absolute one.
_NORMAL = 1.4826


@dataclass(frozen=True, slots=True)
class PassFit:
    """Costs of a verifier; what a second of drafting beside a pass adds to it; and how much else passes vary."""

    costs: VerifierCosts
    pass_per_draft: float
    noise: float


def fit_passes(loads: Sequence[Calibration], row_multiple: int, max_nodes: int) -> PassFit:
    """All passes tell together what passes cost by themselves and what drafting beside them adds.

    Raises:
        BenchmarkError: there are too few passes to tell anything.
    """
    most = max((one.rows for load in loads for one in load.records.passes), default=0)
    if not most:
        raise BenchmarkError("no pass ran: too few loads to tell what passes cost")
    knees = [knee for knee in KNEES if knee < most] or [1]
    observed = [_observed(load, knees, row_multiple) for load in loads]
    found = fit(observed)
    pass_per_draft, sequence_s, round_row_s, prompt_s, context_s, least_s, *slopes = map(float, found)
    ends = [*knees[1:], max(most, knees[-1] + 1)]
    seconds = [least_s]
    for slope, low, high in zip(slopes, knees, ends, strict=True):
        seconds.append(seconds[-1] + slope * (high - low))
    gap_s, gap_sequence_s, gap_token_s = map(float, _after(loads))
    start_s, start_sequence_s = map(float, _before(loads))
    costs = VerifierCosts(
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
    errors = np.concatenate([np.abs(np.log(one.seconds / (one.features @ found))) for one in observed])
    return PassFit(costs, round(min(pass_per_draft, MOST_LOST), 4), round(_NORMAL * float(np.median(errors)), 4))


def _observed(load: Calibration, knees: Sequence[int], row_multiple: int) -> Observations:
    drafting = Timeline((one.started_s, one.ended_s) for one in load.records.drafts)
    passes = load.records.passes
    features = [
        [drafting.within(one.started_s, one.ended_s), *_features(work_of(one), knees, row_multiple)] for one in passes
    ]
    return observations(features, [one.pass_s for one in passes], 6 + len(knees))


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
