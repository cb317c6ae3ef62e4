"""Nobody waits for drafts that never come within the wait."""

from __future__ import annotations

import pytest

from coppice.v1 import tree_pb2
from orchestrator.planner.adaptive import AdaptivePlanner
from orchestrator.planner.base import RoundContext
from orchestrator.planner.draft_plans import DraftPlans, PlanSnapshot
from orchestrator.planner.draft_times import AskTimes, DraftTimes
from orchestrator.planner.source_choice import NONE_LEFT_OUT
from orchestrator.request.rounds import Outcome

LINGER_US = 40_000
# A second of waiting is worth 100 tokens, and a usual draft five: 50 ms, more than the most.
SNAPSHOT = PlanSnapshot(gain=5.0, nodes=8.0, rate=100.0)


def times(quickest_s: float, way_s: float = 0.0) -> DraftTimes:
    known = DraftTimes()
    known.quickest_s, known.way_s = quickest_s, way_s
    return known


def linger_us(quickest_s: float, way_s: float = 0.0, *, is_trial: bool = False) -> int:
    plans = DraftPlans(SNAPSHOT, 1, LINGER_US, times(quickest_s, way_s))
    return plans.plan(1.0, 1.0, 8, 1, NONE_LEFT_OUT, is_trial, waits=True).linger_us


@pytest.mark.parametrize("is_trial", [False, True])
def test_a_wait_that_no_draft_was_ever_quick_enough_for_is_none(*, is_trial: bool) -> None:
    assert linger_us(0.0, is_trial=is_trial) == LINGER_US
    assert linger_us(0.039, is_trial=is_trial) == LINGER_US
    assert linger_us(0.041, is_trial=is_trial) == 0


def test_the_way_to_the_verifier_and_back_counts_too_but_trials_find_out_whether_it_still_does() -> None:
    assert linger_us(0.02, 0.019) == LINGER_US
    assert linger_us(0.02, 0.021) == 0
    assert linger_us(0.02, 0.021, is_trial=True) == LINGER_US


def test_the_quickest_of_the_latest_drafts_counts_once_there_are_some() -> None:
    known = DraftTimes()
    for seconds in (0.2, 0.3, 0.25):
        known.add(seconds)
        assert known.quickest_s == 0
    known.add(0.21)
    assert known.quickest_s == 0.2
    for _ in range(40):
        known.add(0.05)
    assert known.quickest_s == 0.05
    # Far away from now on: what was seen before is forgotten.
    for _ in range(40):
        known.add(0.5)
    assert known.quickest_s == 0.5


def test_waits_in_time_tell_the_way_and_vain_ones_only_that_it_is_longer() -> None:
    known = DraftTimes()
    for waited_s in (0.04, 0.04, 0.03):
        known.waited(waited_s, 0.02, was_in_time=False)
        assert known.way_s == 0
    known.waited(0.04, 0.02, was_in_time=False)
    assert 0.02 < known.way_s < 0.03
    # Others that the pass waited for, too, make a wait longer than the way.
    for waited_s in (0.09, 0.034, 0.05):
        known.waited(waited_s, 0.02, was_in_time=True)
    assert known.way_s == pytest.approx(0.014)
    for _ in range(40):
        known.waited(0.021, 0.02, was_in_time=True)
    assert known.way_s == pytest.approx(0.001)


def test_a_drafter_that_is_slow_for_once_says_nothing_of_the_way() -> None:
    known = DraftTimes()
    for _ in range(40):
        # Vain waits for a draft that took long, and rounds that began with something else.
        known.waited(0.04, 0.5, was_in_time=False)
        known.waited(0.002, 0.02, was_in_time=True)
    assert known.way_s == 0


@pytest.mark.parametrize(
    ("waited_us", "origin", "expected_us"),
    [
        (35_000, tree_pb2.DRAFT_ORIGIN_FRESH, LINGER_US),
        (39_000, tree_pb2.DRAFT_ORIGIN_FRESH, LINGER_US),
        (40_000, tree_pb2.DRAFT_ORIGIN_UNSPECIFIED, 0),
        (2_000, tree_pb2.DRAFT_ORIGIN_REROOTED, LINGER_US),
    ],
)
def test_a_request_learns_the_way_from_what_the_verifier_says_of_its_rounds(
    waited_us: int, origin: tree_pb2.DraftOrigin, expected_us: int
) -> None:
    planner = AdaptivePlanner(8, LINGER_US)
    request = planner.follow(is_greedy=True)
    request.plan(RoundContext(has_drafter=True))
    request.round_over(outcome(0, 0, tree_pb2.DRAFT_ORIGIN_UNSPECIFIED), [], asked=True)
    for number in range(1, 6):
        request.tree_arrived(0.022)
        request.round_over(outcome(number, waited_us, origin), [], asked=True)
    request.close()
    plan = planner.follow(is_greedy=True).plan(RoundContext(has_drafter=True))
    assert (plan.max_nodes, plan.linger_us) == (8, expected_us)


def outcome(number: int, waited_us: int, origin: tree_pb2.DraftOrigin) -> Outcome:
    return Outcome(10 + number, (7,), 0, 0, 0, 0, b"", 1, 10_000, waited_us, 0, draft_origin=origin)


@pytest.mark.parametrize(("took_s", "expected_us"), [(0.01, LINGER_US), (0.1, 0)])
def test_requests_that_know_nothing_else_do_not_wait_in_vain_either(took_s: float, expected_us: int) -> None:
    planner = AdaptivePlanner(8, LINGER_US)
    first = planner.follow(is_greedy=True)
    assert first.plan(RoundContext(has_drafter=True)).linger_us == LINGER_US
    for _ in range(8):
        first.tree_arrived(took_s)
    first.close()
    second = planner.follow(is_greedy=True)
    plan = second.plan(RoundContext(has_drafter=True))
    assert (plan.max_nodes, plan.linger_us) == (8, expected_us)
    # Who insists on drafts waits for them.
    assert second.plan(RoundContext(has_drafter=True, forced=True)).linger_us == LINGER_US


def test_times_are_from_the_first_that_was_asked_to_the_first_that_came() -> None:
    now_s = 5.0
    asked = AskTimes(lambda: now_s)
    asked.note(10)
    now_s = 5.25
    asked.note(10)
    now_s = 5.5
    assert asked.first_took_s(10) == 0.5
    assert asked.first_took_s(10) is None
    assert asked.first_took_s(11) is None
    for length in range(1000):
        asked.note(length)
    # Behind lengths of long ago nothing comes any more.
    assert asked.first_took_s(0) is None
    assert asked.first_took_s(999) == 0
