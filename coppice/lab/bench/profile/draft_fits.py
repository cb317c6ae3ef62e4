"""From drafts that were seen in service to what drafts cost, alone and beside passes of the target. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coppice.lab.bench.contenders import BenchmarkError
from coppice.lab.bench.profile.calibration import Calibration, fit, observations
from coppice.lab.bench.profile.records import DraftRecord
from coppice.lab.bench.profile.timeline import Timeline
from coppice.lab.simulator.machine import Curve, DrafterCosts

# Drafts that tell anything, at least.
MIN_SAMPLES = 3
# A draft that a pass ran beside for less of its time than this counts as one without.
ALONE = 0.02
# Beside a pass a drafter goes on at this share of its speed at the least, so that it comes to an end.
LEAST_SPEED = 0.01
# Tokens since the last draft beyond which a draft is one that has a prompt to read.
MOST_NEW = 32


@dataclass(frozen=True, slots=True)
class DraftFit:
    """Costs of a drafter by itself, and how many times as long drafts take while a pass runs."""

    costs: DrafterCosts
    draft_factor: float


def fit_drafts(loads: Sequence[Calibration]) -> DraftFit:
    """By nodes where no pass ran beside; what the others took longer, was lost to passes.

    Raises:
        BenchmarkError: there are too few drafts to tell anything.
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
    base_s, node_s = map(
        float,
        fit(
            [
                observations([[1.0, draft.num_nodes] for draft in drafts], [_seconds(draft) for draft in drafts], 2)
                for drafts in loads
            ]
        ),
    )
    most = max(draft.num_nodes for drafts in loads for draft in drafts)
    return Curve((0, max(1, most)), (base_s, base_s + node_s * max(1, most)))


def _num_unread(draft: DraftRecord) -> int:
    """What it had to read beside one token. Of a few new ones its last tree had most; reading them is in the curve."""
    return draft.num_new if draft.num_new > MOST_NEW else 1


def _seconds(draft: DraftRecord) -> float:
    return draft.ended_s - draft.started_s
