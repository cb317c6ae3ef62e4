"""From when outcomes, drafts and requests were seen at which service to what messages take. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.profile.calibration import Calibration
from benchmarks.profile.nonnegative import nonnegative
from simulator.machine import OrchestratorCosts

# Places of an outcome among those of its pass that are looked at, and samples that a place needs.
MOST_PLACES = 16
MIN_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class MessageFit:
    """Seconds of a message from one service to the next, and what the orchestrator takes for one."""

    message_s: float
    orchestrator: OrchestratorCosts


def fit_messages(loads: Sequence[Calibration], after_s: float) -> MessageFit:
    """An outcome's way to the drafter is two messages, and the orchestrator's work for it and those before it.

    `after_s`: from the end of one request's pass to when its outcome is on its way.
    """
    places, delays = [], []
    for load in loads:
        for place, seconds in _outcome_delays(load).items():
            if len(seconds) >= MIN_SAMPLES:
                places.append([2.0, 1.0 + place])
                delays.append(statistics.median(seconds))
    message_s, outcome_s = nonnegative(np.array(places), np.array(delays)) if places else (0.0, 0.0)
    few = min((load.concurrency for load in loads if load.speculates), default=0)
    back = [delay for load in loads if load.speculates and load.concurrency == few for delay in _tree_delays(load)]
    tree_s = max(0.0, statistics.median(back) - 2 * message_s) if back else 0.0
    fewest = min(load.concurrency for load in loads)
    turns = [seconds for load in loads if load.concurrency == fewest for seconds in _turnarounds(load)]
    known_s = after_s + message_s + outcome_s
    turnaround_s = max(0.0, statistics.fmean(turns) - known_s) if turns else 0.0
    return MessageFit(float(message_s), OrchestratorCosts(float(outcome_s), float(tree_s), float(turnaround_s)))


def _outcome_delays(load: Calibration) -> dict[int, list[float]]:
    """By an outcome's place in its pass: from when outcomes were on their way to when the drafter was asked."""
    asked_s = {(one.request_id, one.base_length): one.asked_s for one in load.records.drafts}
    found: dict[int, list[float]] = {}
    for one in load.records.passes:
        for place, each in enumerate(one.rounds[:MOST_PLACES]):
            at_s = asked_s.get((each.request_id, each.length))
            # One that was asked for before, and has taken this outcome in, tells nothing.
            if at_s is not None and at_s > one.ended_s:
                found.setdefault(place, []).append(max(0.0, at_s - one.delivered_s))
    return found


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
