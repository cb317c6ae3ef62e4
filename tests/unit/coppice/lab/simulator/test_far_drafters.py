"""Drafters that are far away: what the planner makes of drafts that come late, or never in time."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from coppice.lab.simulator.deployment import Fleet
from coppice.lab.simulator.loads import ClosedLoad, Workload
from coppice.lab.simulator.policies import Policy
from coppice.lab.simulator.scenario import Scenario
from tests.unit.coppice.lab.simulator.machines import right_trace, usual_machine

# A planner that knows nothing spends about half a second on finding out, once. That is in it.
LOAD = ClosedLoad(1, 40.0)


@functools.cache
def speed(policy: str, message_ms: float, depth: int) -> float:
    machine = replace(usual_machine(), message_s=message_ms / 1000)
    workload = Workload((right_trace(depth),), 64, 64)
    return Scenario(machine, workload, Fleet(1, 1)).run(Policy.parse(policy), LOAD).tokens_per_s


# Where drafts come in time, where they are about as long under way as a pass takes, and where they never are.
@pytest.mark.parametrize("message_ms", [5, 10, 50])
@pytest.mark.parametrize("depth", [2, 5])
def test_the_planner_is_not_slower_than_plain_decoding_however_far_drafters_are(message_ms: float, depth: int) -> None:
    assert speed("planner", message_ms, depth) >= 0.97 * speed("off", message_ms, depth)


def test_the_further_away_the_less_is_gained_and_a_fixed_plan_loses() -> None:
    gains = [speed("planner", ms, 5) / speed("off", ms, 5) for ms in (0.2, 5, 50)]
    assert gains[0] > 2
    assert gains == sorted(gains, reverse=True)
    assert speed("fixed=7", 50, 5) < 0.8 * speed("off", 50, 5)
