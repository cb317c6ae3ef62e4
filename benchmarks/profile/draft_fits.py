"""From drafts that were seen in service to what drafts cost, alone and beside passes of the target. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.contenders import BenchmarkError
from benchmarks.profile.calibration import Calibration
from benchmarks.profile.records import DraftRecord
from benchmarks.profile.timeline import Timeline
from simulator.machine import Curve, DrafterCosts, non_falling

# Drafts are put together by size: from each of these to before the next.
SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
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
    """Means by size where no pass ran beside; what the others took longer, was lost to passes.

    Raises:
        BenchmarkError: there are too few drafts to tell anything.
    """
    alone: list[DraftRecord] = []
    beside: list[tuple[DraftRecord, float]] = []
    for load in loads:
        computing = Timeline((one.started_s, one.ended_s) for one in load.records.passes)
        for draft in load.records.drafts:
            pass_s = computing.within(draft.started_s, draft.ended_s)
            if pass_s < ALONE * _seconds(draft):
                alone.append(draft)
            else:
                beside.append((draft, pass_s))
    usual = [draft for draft in alone if draft.num_new <= MOST_NEW]
    if len(usual) < MIN_SAMPLES:
        raise BenchmarkError("hardly any draft was made between passes: too few loads to tell what drafts cost")
    curve = _curve(usual)
    reading = [draft for draft in alone if draft.num_new > MOST_NEW]
    new = sum(draft.num_new - 1 for draft in reading)
    read_s = sum(_seconds(draft) - curve.at(draft.num_nodes) for draft in reading)
    costs = DrafterCosts(curve, max(0.0, read_s / new) if new else 0.0)
    pass_s = sum(seconds for _, seconds in beside)
    lost_s = sum(_seconds(draft) - costs.draft_s(draft.num_nodes, _num_unread(draft)) for draft, _ in beside)
    lost = min(max(0.0, lost_s / pass_s), 1 - LEAST_SPEED) if pass_s else 0.0
    return DraftFit(costs, round(1 / (1 - lost), 4))


def _curve(drafts: Sequence[DraftRecord]) -> Curve:
    bins: dict[int, list[DraftRecord]] = {}
    for draft in drafts:
        bins.setdefault(max(size for size in SIZES if size <= draft.num_nodes), []).append(draft)
    least = min(MIN_SAMPLES, max(map(len, bins.values())))
    full = [bins[size] for size in sorted(bins) if len(bins[size]) >= least]
    sizes = [round(statistics.fmean(draft.num_nodes for draft in group)) for group in full]
    seconds = non_falling([statistics.fmean(map(_seconds, group)) for group in full])
    # Means of neighbouring bins may round to one size.
    points = dict(zip(sizes, seconds, strict=True))
    return Curve(tuple(points), tuple(points.values()))


def _num_unread(draft: DraftRecord) -> int:
    """What it had to read beside one token. Of a few new ones its last tree had most; reading them is in the curve."""
    return draft.num_new if draft.num_new > MOST_NEW else 1


def _seconds(draft: DraftRecord) -> float:
    return draft.ended_s - draft.started_s
