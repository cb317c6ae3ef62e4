"""Plans of requests at a price, a gain and a load that are known."""

from __future__ import annotations

import math

import pytest

from orchestrator.planner.adaptive import LEAST_SHARE, SPARE_NODES, TURN_AFTER, AdaptivePlanner, AdaptiveRequest
from orchestrator.planner.base import RoundContext, RoundPlan
from orchestrator.planner.paired_choice import OFF
from orchestrator.request.rounds import Outcome

MAX_NODES, LINGER_US = 24, 40_000
CONTEXT = RoundContext(has_drafter=True)


def planner_with(num_running: int, **known: float) -> tuple[AdaptivePlanner, list[AdaptiveRequest]]:
    """A planner and its running requests, all of which have had their first tree."""
    planner = AdaptivePlanner(MAX_NODES, LINGER_US, clock=lambda: 0.0)
    requests = [planner.follow(is_greedy=True) for _ in range(num_running)]
    for request in requests:
        request.plan(CONTEXT)
        request.round_over(Outcome(9, (1,), 0, 0, 0, 0, b"", 1, 1000, 0, 0), [], asked=False)
        request.tree_arrived()
    for name, value in known.items():
        setattr(planner, name, value)
    planner.plans.clear()
    planner.prefill.num_unread = 0
    return planner, requests


@pytest.mark.parametrize("num_running", [1, 4])
def test_a_round_waits_as_long_as_its_draft_is_worth_and_never_longer_than_the_limit(num_running: int) -> None:
    _, [request, *_] = planner_with(num_running, rate=500.0, mean_accepted=2.0, mean_nodes=4.0, price=0.1)
    plan = request.plan(CONTEXT)
    # Two tokens, at 500 per second of all requests.
    assert plan.linger_us == min(LINGER_US, 4000 * num_running)
    assert plan.max_nodes == (MAX_NODES if num_running == 1 else 1 + math.ceil(4 * SPARE_NODES))
    assert plan.row_price == 0.1


def test_requests_alike_share_a_plan_until_something_changes() -> None:
    planner, requests = planner_with(4, rate=500.0, mean_accepted=2.0)
    first, *others = [request.plan(CONTEXT) for request in requests]
    assert all(plan is first for plan in others)
    planner.follow(is_greedy=True).plan(CONTEXT)
    assert requests[0].plan(CONTEXT) is not first


def test_a_request_whose_drafts_do_not_pay_stands_aside_and_has_a_turn_later() -> None:
    planner, [request, other] = planner_with(2, rate=500.0, mean_accepted=2.0, break_even=2.0)
    request._gain = 0.9 * LEAST_SHARE
    other._gain = 1.1 * LEAST_SHARE
    asked = []
    for number in range(TURN_AFTER + 20):
        asked.append(request.plan(CONTEXT).max_nodes > 0)
        request.round_over(Outcome(9 + number, (1,), 0, 0, 0, 0, b"", 1, 1000 + number, 0, 0), [], asked=asked[-1])
        planner.rate, planner.break_even, planner.mean_accepted = 500.0, 2.0, 2.0
    assert not any(asked[:TURN_AFTER])
    assert sum(asked) > 5
    assert planner.num_turns == 1
    assert other.plan(CONTEXT).max_nodes > 0


def test_without_drafting_no_round_asks_or_waits_and_forced_ones_do() -> None:
    planner, [request] = planner_with(1)
    planner.asks = False
    planner.choice.current = planner.choice.best = OFF
    assert request.plan(CONTEXT) == RoundPlan(0, 0)
    assert request.plan(CONTEXT._replace(forced=True)) == RoundPlan(MAX_NODES, LINGER_US)


def test_a_request_that_joins_late_does_not_wait_while_drafters_read_it() -> None:
    planner, [request, _] = planner_with(2, rate=500.0, mean_accepted=2.0)
    planner.asks = False
    request.plan(CONTEXT)
    planner.asks = True
    plan = request.plan(CONTEXT)
    assert (plan.max_nodes > 0, plan.linger_us) == (True, 0)
    request.tree_arrived()
    assert request.plan(CONTEXT).linger_us > 0
