"""How much is spent on finding out whether the other way would be better."""

from __future__ import annotations

import pytest

from orchestrator.planner.exploration import (
    FIRST_PAUSE_AFTER,
    FIRST_TRIAL_SHARE,
    LONGEST_BETWEEN_PAUSES,
    PAUSE_PASSES,
    TRIAL_ROUNDS,
    TRIALS_ALONE,
    Exploration,
)

PASS_S = 0.01


def passes(exploration: Exploration, count: int, running: int, asking: int) -> tuple[int, int]:
    """So many passes of requests that draft or not unless they are told; returns those of pauses and of trials.

    Who is to try alone finds nothing, and is done at once.
    """
    pauses = trials = 0
    for _ in range(count):
        if any(exploration.tries_alone() for _ in range(running)):
            exploration.tried_alone()
            exploration.trial_over(found_gain=False)
        pauses += exploration.is_pausing
        trials += exploration.is_trying
        asked = 0 if exploration.is_pausing else running if exploration.is_trying else asking
        if exploration.next_pass(running, asked, running, PASS_S, is_settled=True):
            exploration.trial_over(found_gain=False)
    return pauses, trials


@pytest.mark.parametrize("running", [1, 5, 64])
def test_where_drafting_pays_pauses_come_soon_and_then_seldom(running: int) -> None:
    exploration = Exploration(seed=0)
    first, _ = passes(exploration, FIRST_PAUSE_AFTER + PAUSE_PASSES + 1, running, running)
    assert first >= PAUSE_PASSES
    passes(exploration, 2000, running, running)
    later, trials = passes(exploration, 10_000, running, running)
    assert 0.7 <= later / (10_000 * PAUSE_PASSES / LONGEST_BETWEEN_PAUSES) <= 1.3
    assert trials == 0


def test_where_it_does_not_pay_it_is_tried_at_once_and_then_in_a_small_share_of_the_time() -> None:
    exploration = Exploration(seed=0)
    _, first = passes(exploration, TRIAL_ROUNDS + 1, running=4, asking=0)
    assert first == TRIAL_ROUNDS
    _, later = passes(exploration, 20_000, running=4, asking=0)
    assert TRIAL_ROUNDS <= later <= 1.2 * FIRST_TRIAL_SHARE * 20_000


def trials_of_all(found_alone: bool, count: int = 20_000) -> tuple[int, int]:
    """Trials of all of eight requests, and of one alone that finds a gain or does not, in so many passes."""
    exploration = Exploration(seed=0)
    for _ in range(count):
        if any(exploration.tries_alone() for _ in range(8)):
            exploration.tried_alone()
            exploration.trial_over(found_alone)
        if exploration.next_pass(8, 8 if exploration.is_trying else 0, 8, PASS_S, is_settled=True):
            exploration.trial_over(found_gain=False)
    return exploration.num_trials, exploration.num_trials_alone


def test_behind_a_trial_of_all_in_vain_some_try_alone_before_all_do_again_unless_one_finds_a_gain() -> None:
    num_trials, num_alone = trials_of_all(found_alone=False)
    assert num_trials > 3
    assert TRIALS_ALONE * (num_trials - 1) <= num_alone <= TRIALS_ALONE * num_trials
    more_trials, num_alone = trials_of_all(found_alone=True)
    assert more_trials > 3 * num_trials
    assert abs(num_alone - more_trials) <= 1


def test_another_load_is_tried_at_once_again() -> None:
    exploration = Exploration(seed=0)
    passes(exploration, 300, running=1, asking=0)
    _, trials = passes(exploration, TRIAL_ROUNDS + 1, running=8, asking=0)
    assert trials == TRIAL_ROUNDS


def test_of_many_requests_one_at_a_time_tries_and_each_gets_its_turn() -> None:
    exploration = Exploration(seed=0)
    tried = set()
    for _ in range(60_000):
        chosen = [number for number in range(20) if exploration.tries_alone()]
        assert len(chosen) <= 1
        tried.update(chosen)
        if chosen:
            exploration.next_pass(20, 1, 20, PASS_S, is_settled=True)
            exploration.tried_alone()
            exploration.trial_over(found_gain=False)
        assert not exploration.next_pass(20, 0, 20, PASS_S, is_settled=True)
    assert tried == set(range(20))


def test_the_seed_decides() -> None:
    def trace(seed: int) -> list[tuple[int, int]]:
        exploration = Exploration(seed)
        return [passes(exploration, 50, 3, asking) for asking in [3, 0] * 20]

    assert trace(1) == trace(1) != trace(2)
