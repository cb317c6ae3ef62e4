"""Nobody waits for drafts that never come within the wait."""

from __future__ import annotations

import pytest

from orchestrator.asked_at import AskedAt
from orchestrator.planner import Situation
from orchestrator.planning.adaptive import AdaptivePlanner
from orchestrator.planning.draft_plans import DraftPlans
from orchestrator.planning.draft_times import DraftTimes
from orchestrator.planning.source_choice import NONE_LEFT_OUT
from orchestrator.planning.stance import Stance

LINGER_US = 40_000
# A second of waiting is worth 100 tokens, and a usual draft five: 50 ms, more than the most.
STANCE = Stance(gain=5.0, nodes=8.0, rate=100.0)


def linger_us(quickest_s: float, *, is_trial: bool = False) -> int:
    plans = DraftPlans(STANCE, 1, LINGER_US, quickest_s)
    return plans.plan(1.0, 1.0, 8, 1, NONE_LEFT_OUT, is_trial, waits=True).linger_us


@pytest.mark.parametrize("is_trial", [False, True])
def test_a_wait_that_no_draft_was_ever_quick_enough_for_is_none(*, is_trial: bool) -> None:
    assert linger_us(0.0, is_trial=is_trial) == LINGER_US
    assert linger_us(0.039, is_trial=is_trial) == LINGER_US
    assert linger_us(0.041, is_trial=is_trial) == 0


def test_the_quickest_of_the_latest_drafts_counts_once_there_are_some() -> None:
    times = DraftTimes()
    for seconds in (0.2, 0.3, 0.25):
        times.add(seconds)
        assert times.quickest_s == 0
    times.add(0.21)
    assert times.quickest_s == 0.2
    for _ in range(40):
        times.add(0.05)
    assert times.quickest_s == 0.05
    # Far away from now on: what was seen before is forgotten.
    for _ in range(40):
        times.add(0.5)
    assert times.quickest_s == 0.5


@pytest.mark.parametrize(("took_s", "expected_us"), [(0.01, LINGER_US), (0.1, 0)])
def test_requests_that_know_nothing_else_do_not_wait_in_vain_either(took_s: float, expected_us: int) -> None:
    planner = AdaptivePlanner(8, LINGER_US)
    first = planner.follow(is_greedy=True)
    assert first.plan(Situation(has_drafter=True)).linger_us == LINGER_US
    for _ in range(8):
        first.tree_arrived(took_s)
    first.close()
    second = planner.follow(is_greedy=True)
    plan = second.plan(Situation(has_drafter=True))
    assert (plan.max_nodes, plan.linger_us) == (8, expected_us)
    # Who insists on drafts waits for them.
    assert second.plan(Situation(has_drafter=True, forced=True)).linger_us == LINGER_US


def test_times_are_from_the_first_that_was_asked_to_the_first_that_came() -> None:
    now_s = 5.0
    asked = AskedAt(lambda: now_s)
    asked.note(10)
    now_s = 5.25
    asked.note(10)
    now_s = 5.5
    assert asked.since(10) == 0.5
    assert asked.since(10) is None
    assert asked.since(11) is None
    for length in range(1000):
        asked.note(length)
    # Behind lengths of long ago nothing comes any more.
    assert asked.since(0) is None
    assert asked.since(999) == 0
