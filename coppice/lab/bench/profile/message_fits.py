"""From when outcomes, drafts and requests were seen at which service to what messages take. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from coppice.lab.bench.profile.calibration import Calibration
from coppice.lab.bench.profile.orchestrator_fits import fit_orchestrator
from coppice.lab.simulator.machine import OrchestratorCosts


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
    """From when outcomes were on their way to when the drafter was asked behind them."""
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
