"""The adaptive planner where several drafters may serve a request: whatever they cost, the best of them, or none."""

from __future__ import annotations

import pytest

from tests.unit.orchestrator.planner.shared_cores import Drafter, SharedCores

GOOD, FAIR, POOR, BAD = (Drafter(right) for right in (0.75, 0.6, 0.4, 0.1))
FOUR = {"fair": FAIR, "poor": POOR, "good": GOOD, "bad": BAD}
# About 28 requests' tokens until it has settled, and what it has from then on.
SETTLING, SETTLED = 2700, 8000


@pytest.mark.parametrize(("seed", "num_requests"), [(0, 1), (1, 4)])
def test_where_all_together_are_slower_than_none_and_one_is_quicker_that_one_is_found(
    num_requests: int, seed: int
) -> None:
    one = SharedCores(FOUR, num_requests, seed)
    alone = SharedCores({"good": GOOD}, num_requests, seed)
    assert one.run(SETTLING) >= 0.97
    alone.run(SETTLING)
    assert one.run(SETTLED) >= 0.92 * alone.run(SETTLED)
    # Until it has settled, and in trials.
    assert one.share_asked("good") >= 0.7
    assert max(map(one.share_asked, ("fair", "poor", "bad"))) <= 0.15


@pytest.mark.parametrize("num_requests", [1, 4])
def test_where_drafters_have_cores_of_their_own_those_that_add_something_are_asked_together(num_requests: int) -> None:
    apart = SharedCores(FOUR, num_requests, are_apart=True)
    alone = SharedCores({"good": GOOD}, num_requests)
    for one in (apart, alone):
        one.run(SETTLING)
    assert apart.run(SETTLED) >= 1.05 * alone.run(SETTLED)
    assert min(map(apart.share_asked, ("good", "fair"))) >= 0.8
    assert apart.share_asked("bad") <= 0.2


@pytest.mark.parametrize("num_requests", [1, 4])
def test_where_no_drafter_gains_anything_what_it_takes_to_see_that_is_little(num_requests: int) -> None:
    one = SharedCores({"fair": POOR, "poor": POOR, "worse": Drafter(0.3), "bad": BAD}, num_requests)
    assert one.run(SETTLING) >= 0.86
    assert one.run(2 * SETTLED) >= 0.97


def test_when_the_best_drafter_becomes_a_poor_one_another_takes_its_place() -> None:
    one = SharedCores(FOUR)
    one.run(SETTLING)
    one.drafters |= {"good": POOR, "fair": GOOD}
    one.run(SETTLING)
    one.rounds.clear()
    assert one.run(SETTLED) >= 1.2
    assert one.share_asked("fair") >= 0.8


def test_a_drafter_that_is_gone_in_its_turn_holds_nobody_up() -> None:
    one = SharedCores({"first": GOOD, "good": GOOD, "poor": POOR})
    one.run(20)
    assert one.share_asked("first") == 1.0
    one.leave("first")
    one.run(SETTLING)
    assert one.run(SETTLED) >= 1.2


def test_where_one_drafter_is_left_before_all_were_compared_it_is_judged_alone() -> None:
    one = SharedCores({"first": GOOD, "bad": BAD})
    one.run(20)
    one.leave("first")
    one.run(SETTLING)
    assert one.run(SETTLED) >= 0.97
