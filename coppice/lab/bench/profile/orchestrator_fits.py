"""From the CPU time of the orchestrator's process to what it takes for a message. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from coppice.lab.bench.profile.calibration import Calibration, Observations, fit, observations

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
    outcome_s, draft_s = map(float, fit([_observed(load) for load in many]))
    return OrchestratorFit(outcome_s, draft_s, max(1.0, _factor(many, outcome_s, draft_s / 2)))


def _factor(loads: Sequence[Calibration], outcome_s: float, ask_s: float) -> float:
    """Time in which a pass's outcomes became questions to drafters, by the work of these and of trees between them."""
    taken_s = work_s = 0.0
    for load in loads:
        asked_s = {(one.request_id, one.base_length): one.asked_s for one in load.records.drafts}
        trees_s = [one.at_s for one in load.records.trees]
        for one in load.records.passes:
            at_s = sorted(asked_s.get((each.request_id, each.length), -math.inf) for each in one.rounds)
            # Some are not asked behind, or were before.
            if len(at_s) < MIN_OUTCOMES or at_s[0] < one.ended_s:
                continue
            num_trees = bisect_left(trees_s, at_s[-1]) - bisect_left(trees_s, at_s[0])
            taken_s += at_s[-1] - at_s[0]
            work_s += (len(at_s) - 1) * (outcome_s + ask_s) + num_trees * ask_s
    return taken_s / work_s if work_s > 0 else 1.0


def _observed(load: Calibration) -> Observations:
    if len(load.records.cpu) < 2:
        return observations([], [], 2)
    first, last = load.records.cpu[0], load.records.cpu[-1]
    between = load.records.within(first.at_s, last.at_s)
    outcomes = sum(len(one.rounds) for one in between.passes)
    return observations([[outcomes, len(between.trees)]], [last.cpu_s - first.cpu_s], 2)
