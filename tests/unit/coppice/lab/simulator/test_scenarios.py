"""Fleets under loads: what has to hold whatever the numbers are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coppice.lab.simulator.deployment import Fleet
from coppice.lab.simulator.loads import ClosedLoad, PoissonLoad, Workload, percentile
from coppice.lab.simulator.policies import Policy
from coppice.lab.simulator.scenario import ENOUGH, Scenario, errors
from tests.unit.coppice.lab.simulator.machines import right_trace, usual_machine

OFF, FIXED, PLANNER = Policy.parse("off"), Policy.parse("fixed=7"), Policy.parse("planner")
WORKLOAD = Workload((right_trace(5), right_trace(2), right_trace(0)), 16, 64)


def scenario(verifiers: int = 1, drafters: int = 1) -> Scenario:
    return Scenario(usual_machine(), WORKLOAD, Fleet(verifiers, drafters))


def speed(some: Scenario, policy: Policy, load: ClosedLoad) -> float:
    return some.run(policy, load).tokens_per_s


def test_the_same_seed_gives_the_same_answer_and_another_one_another() -> None:
    loads = [ClosedLoad(4, 2.0)]
    answers = [list(replace(scenario(), seed=seed).rows([PLANNER], loads)) for seed in (3, 3, 4)]
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(("num_requests", "share"), [(1, 0.7), (4, 0.92), (16, 0.92)])
def test_the_planner_is_not_slower_than_off_and_hardly_slower_than_a_fixed_tree(
    num_requests: int, share: float
) -> None:
    load = ClosedLoad(num_requests, 4.0)
    planned = speed(scenario(), PLANNER, load)
    assert planned >= 0.97 * speed(scenario(), OFF, load)
    # A request alone, every third of which has no drafts at all, begins to draft anew each time.
    assert planned >= share * speed(scenario(), FIXED, load)


def test_faster_machines_and_machines_of_their_own_are_not_slower() -> None:
    load, machine = ClosedLoad(8, 3.0), usual_machine()
    usual = speed(scenario(), FIXED, load)
    for better in (machine.scaled(2.0, 1.0), machine.scaled(1.0, 4.0), machine.separated()):
        assert speed(replace(scenario(), machine=better), FIXED, load) > usual
    # Everything twice as fast but messages.
    assert speed(replace(scenario(), machine=machine.scaled(2.0, 2.0)), OFF, load) == pytest.approx(
        2 * speed(scenario(), OFF, load), rel=0.1
    )


def test_two_verifiers_with_twice_the_load_give_twice_as_much() -> None:
    one = speed(scenario(), OFF, ClosedLoad(8, 4.0))
    assert speed(scenario(2, 2), OFF, ClosedLoad(16, 4.0)) == pytest.approx(2 * one, rel=0.05)


def test_as_many_drafters_are_needed_as_bring_nearly_all_that_many_bring() -> None:
    # Drafters that take most of a round, on machines of their own.
    slow = replace(scenario(), machine=usual_machine().scaled(1.0, 0.2).separated())
    load = ClosedLoad(8, 2.0)
    needed = slow.drafters_needed(FIXED, load, slow.run(FIXED, load))
    plenty = speed(replace(slow, fleet=Fleet(1, 8)), FIXED, load)
    assert 1 < needed <= 8
    assert speed(replace(slow, fleet=Fleet(1, needed)), FIXED, load) >= ENOUGH * plenty
    assert speed(replace(slow, fleet=Fleet(1, needed - 1)), FIXED, load) < ENOUGH * plenty


def test_requests_that_arrive_at_random_are_all_answered_where_there_is_time() -> None:
    window = scenario().run(PLANNER, PoissonLoad(2.0, 10.0, seed=5))
    assert 8 < len(window.requests) < 40
    assert all(request.num_tokens == request.max_tokens for request in window.requests)
    assert window.counts.tokens == sum(request.max_tokens for request in window.requests)
    assert len(window.ttfts_s) == len(window.tpots_s) == len(window.requests)


def test_what_arrives_faster_than_it_is_served_waits() -> None:
    waits = [percentile(scenario().run(OFF, PoissonLoad(rate, 10.0)).ttfts_s, 0.5) for rate in (1.0, 60.0)]
    assert waits[0] is not None
    assert waits[1] is not None
    assert waits[1] > 5 * waits[0]


def test_percentiles_are_values_that_are_there() -> None:
    assert percentile([], 0.5) is None
    assert [percentile([3.0, 1.0, 2.0, 4.0], share) for share in (0.0, 0.5, 0.75, 0.99, 1.0)] == [
        1.0,
        2.0,
        3.0,
        4.0,
        4.0,
    ]


def test_errors_are_of_either_sign() -> None:
    rows = [{"simulated/measured": value, "is_fitted": False} for value in (0.9, 1.02, 1.3)]
    assert errors(rows) == {"simulator.error": 0.1, "simulator.error.max": 0.3}


def test_a_load_that_the_machine_was_fitted_to_is_no_prediction() -> None:
    rows = [{"simulated/measured": value, "is_fitted": value > 1.5} for value in (0.9, 1.02, 1.3, 2.0, 3.0)]
    assert errors(rows) == {"simulator.error": 0.1, "simulator.error.max": 0.3}
    assert errors(rows[3:]) == {}


@pytest.mark.parametrize("name", ["", "on", "fixed", "fixed=0", "fixed=x", "off=3", "planner=1"])
def test_what_is_no_policy_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"policy|fixed"):
        Policy.parse(name)
