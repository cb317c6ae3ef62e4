"""Adaptive plans on several verifiers: each has costs and load of its own, and requests move among them."""

from __future__ import annotations

import itertools

import pytest

from coppice.core.tree import TokenTree, chain
from orchestrator.planner.adaptive import AdaptivePlanner, AdaptiveRequest
from orchestrator.planner.base import RoundContext
from orchestrator.planner.fleet import FleetPlanner
from orchestrator.request.rounds import Outcome

NEAR, FAR = "near:1", "far:2"
SITUATION = RoundContext(has_drafter=True)
TREE = chain([1, 2, 3], [-0.1, -0.1, -0.1])


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def fleet(clock: Clock) -> FleetPlanner:
    return FleetPlanner([NEAR, FAR], max_nodes=15, linger_us=40_000, clock=clock)


def counts(planner: AdaptivePlanner) -> tuple[int, int, int, int]:
    return planner.num_begun, planner.num_running, planner.num_newcomers, planner.prefill.num_unread


def round_over(request: AdaptiveRequest, number: int, pass_us: int) -> None:
    """A round that had asked for a draft, and accepted a part of it."""
    request.plan(SITUATION)
    request.tree_arrived()
    tree: TokenTree = request.select(TREE)
    outcome = Outcome(100 + 2 * number, (1, 2), 1, len(tree), tree.depth, 0, b"", 1 + len(tree), pass_us, 0, 0)
    request.round_over(outcome, [tree], asked=True)


def test_what_passes_cost_is_learned_by_verifier_and_what_drafts_are_worth_by_all() -> None:
    clock = Clock()
    planner = fleet(clock)
    requests = {address: planner.follow(is_greedy=True) for address in (NEAR, FAR)}
    for address, request in requests.items():
        request.plan(SITUATION)
        request.runs_on(address)
    for address, pass_us in ((NEAR, 5_000), (FAR, 50_000)):
        for number in range(60):
            clock.now_s += pass_us / 1e6
            round_over(requests[address], number, pass_us + number)
    near, far = planner.planners[NEAR], planner.planners[FAR]
    assert near.rate > 1.5 * far.rate > 0
    assert near.values is far.values


def test_a_request_belongs_to_the_verifier_that_it_runs_on() -> None:
    planner = fleet(Clock())
    near, far = planner.planners[NEAR], planner.planners[FAR]
    request = planner.follow(is_greedy=True)
    assert request.plan(SITUATION).max_nodes > 0
    assert sorted([counts(near), counts(far)]) == [(0, 0, 0, 0), (1, 0, 1, 1)]
    request.runs_on(FAR)
    assert (counts(near), counts(far)) == ((0, 0, 0, 0), (1, 0, 1, 1))
    round_over(request, 0, 5000)
    assert (counts(near), counts(far)) == ((0, 0, 0, 0), (1, 1, 0, 0))
    # Its verifier is lost.
    request.runs_on(NEAR)
    assert (counts(near), counts(far)) == ((1, 0, 0, 1), (0, 0, 0, 0))
    round_over(request, 1, 5000)
    assert (counts(near), counts(far)) == ((1, 1, 0, 0), (0, 0, 0, 0))
    request.close()
    request.runs_on(FAR)
    assert (counts(near), counts(far)) == ((0, 0, 0, 0), (0, 0, 0, 0))


def test_a_request_that_is_closed_before_it_has_begun_leaves_nothing() -> None:
    planner = fleet(Clock())
    planner.follow(is_greedy=True).close()
    never_planned = planner.follow(is_greedy=True)
    never_planned.runs_on(FAR)
    never_planned.close()
    assert [counts(one) for one in planner.planners.values()] == [(0, 0, 0, 0)] * 2


@pytest.mark.parametrize("moves", [1, 6])
def test_nothing_is_left_of_requests_that_have_moved(moves: int) -> None:
    clock = Clock()
    planner = fleet(clock)
    requests = [planner.follow(is_greedy=number % 2 == 0, priority=number % 3) for number in range(20)]
    addresses = itertools.cycle([NEAR, FAR, FAR])
    for number in range(4 * moves):
        for request in requests:
            clock.now_s += 0.001
            if number % 4 == 0:
                request.plan(SITUATION)
                request.runs_on(next(addresses))
            round_over(request, number, 4_000 + number)
    for request in requests:
        request.close()
    for one in planner.planners.values():
        assert counts(one) == (0, 0, 0, 0)
        assert one.weights.mean == 1.0


def test_a_request_begins_with_a_verifier_that_it_can_go_to() -> None:
    planner = FleetPlanner([NEAR, FAR], max_nodes=15, linger_us=40_000, is_usable=lambda address: address == FAR)
    for _ in range(3):
        planner.follow(is_greedy=True).plan(SITUATION)
    assert [one.num_begun for one in planner.planners.values()] == [0, 3]
    # Where there is none it begins with some.
    away = FleetPlanner([NEAR, FAR], max_nodes=15, linger_us=40_000, is_usable=lambda address: False)
    away.follow(is_greedy=True).plan(SITUATION)
    assert sum(one.num_begun for one in away.planners.values()) == 1
