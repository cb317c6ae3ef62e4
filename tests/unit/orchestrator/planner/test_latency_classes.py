"""Latency classes and the floor below which no request's share falls."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from coppice.core.tree import chain
from coppice.lab.simulator.policies import LINGER_US, MAX_NODES, Policy
from orchestrator.planner.adaptive import AdaptivePlanner, AdaptiveRequest
from orchestrator.planner.base import Planner, RoundContext
from orchestrator.planner.load import class_weight
from tests.unit.orchestrator.planner.drawn_text import Predictability
from tests.unit.orchestrator.planner.endless_load import EndlessLoad

PLANNER = Policy("planner")
EASY, HARD = Predictability(), Predictability(first=0.1, second=0.05)


class Classed(AdaptivePlanner):
    """Gives requests priorities in turns."""

    def __init__(self, priorities: list[int], clock: Callable[[], float]) -> None:
        super().__init__(MAX_NODES, LINGER_US, clock=clock)
        self._priorities = priorities
        self._num_followed = 0

    def follow(self, is_greedy: bool, priority: int = 0) -> AdaptiveRequest:
        self._num_followed += 1
        return super().follow(is_greedy, self._priorities[self._num_followed % len(self._priorities)])


def deployment(*priorities: int, text: Predictability = EASY, seed: int = 0) -> EndlessLoad:
    def planner(clock: Callable[[], float]) -> Planner:
        return Classed(list(priorities), clock)

    return EndlessLoad(planner, PLANNER, text, seed)


@pytest.mark.parametrize(("priority", "weight"), [(-9, 0.25), (-1, 0.5), (0, 1), (1, 2), (2, 4), (2**31 - 1, 4)])
def test_a_step_of_priority_doubles_what_a_token_counts_within_bounds(priority: int, weight: float) -> None:
    assert class_weight(priority) == weight


def test_where_all_requests_are_of_one_class_classes_change_nothing() -> None:
    runs = []
    for priority in (0, 2, -1):
        one = deployment(priority)
        one.set_load(12)
        one.run(3.0)
        runs.append((one.deployment.counts, one.num_asked))
    assert runs[0] == runs[1] == runs[2]


def test_of_two_classes_the_higher_one_gets_the_rows_and_the_tokens() -> None:
    one = deployment(2, -2)
    one.set_load(12)
    one.run(3.0)
    before = one.seen
    one.run(5.0)
    grown = [now.tokens - then.tokens for then, now in zip(before, one.seen, strict=True)]
    # The first request follows as number 1, the second priority of the two.
    low, high = sum(grown[::2]), sum(grown[1::2])
    assert high > 1.2 * low
    # Nobody stands still.
    assert min(grown) > 0.2 * max(grown)


def asking(priority: int, price: float) -> AdaptiveRequest:
    """A request of its class that drafts beside one of the highest, at a price that is known."""
    planner = AdaptivePlanner(MAX_NODES, LINGER_US)
    planner.follow(is_greedy=True, priority=2).plan(RoundContext(has_drafter=True))
    planner.price, planner.log_price = price, math.log(price)
    request = planner.follow(is_greedy=True, priority=priority)
    assert request.plan(RoundContext(has_drafter=True)).max_nodes > 0
    return request


@pytest.mark.parametrize(("price", "kept"), [(0.02, 3), (0.04, 2), (0.3, 1), (1.2, 1), (1.25, 0)])
def test_who_drafts_keeps_its_likeliest_node_unless_that_is_far_below_the_price(price: float, kept: int) -> None:
    tree = chain([1, 2, 3], [-0.5, -0.5, -0.5])
    assert len(asking(-2, price).select(tree)) == kept
    assert asking(-2, price).select(tree).token_ids == (1, 2, 3)[:kept]


def tokens_per_round_of_the_last(one: EndlessLoad, seconds: float) -> float:
    before = one.seen[-1]
    one.run(seconds)
    return (one.seen[-1].tokens - before.tokens) / (one.seen[-1].rounds - before.rounds)


@pytest.mark.parametrize("seed", range(2))
def test_a_request_whose_text_becomes_easy_drafts_again_although_others_drafted_all_along(seed: int) -> None:
    one = deployment(0, seed=seed)
    one.set_load(3)
    one.set_load(4, HARD)
    one.run(6.0)
    assert tokens_per_round_of_the_last(one, 2.0) < 1.6
    one.change_text(-1, EASY)
    # Its turns come 512 rounds apart, which is five seconds, and for the most part drafters catch up in them: with ten
    # seeds it took from 2 to 20 seconds, and without turns up to 36.
    assert any(tokens_per_round_of_the_last(one, 4.0) > 3 for _ in range(8))
