"""Passes behind a change of what is planned are no measure until the verifier has heard of it."""

from __future__ import annotations

import pytest

from orchestrator.planner.passes import MeasuredRates, PassSample, PlanLagFilter

WAY_S = 0.016


def a_pass(seconds: float, asked: int = 0, rounds: int = 1, *, reads_prompt: bool = False) -> PassSample:
    return PassSample(rounds, asked, rounds, rounds, 100, 0.005, seconds - 0.005, reads_prompt)


def test_a_pass_counts_once_the_one_before_it_ended_a_way_after_the_change() -> None:
    plan_lag = PlanLagFilter()
    for _ in range(8):
        plan_lag.pass_over(a_pass(0.03, asked=1), WAY_S)
    # The message that nobody is to wait is on its way while the second of these begins to wait, and ends that.
    seconds = [0.008, 0.013, 0.006, 0.006]
    assert [plan_lag.pass_over(a_pass(one), WAY_S) for one in seconds] == [False, False, True, True]
    assert [plan_lag.pass_over(a_pass(one, asked=1), WAY_S) for one in seconds] == [False, False, True, True]


def test_near_verifiers_hear_at_once() -> None:
    plan_lag = PlanLagFilter()
    for way_s in (0.0, 0.0004):
        assert all(plan_lag.pass_over(a_pass(0.006, asked), way_s) for asked in (1, 0, 1, 0))


def test_passes_of_which_some_ask_and_those_that_read_prompts_change_nothing() -> None:
    plan_lag = PlanLagFilter()
    for _ in range(8):
        plan_lag.pass_over(a_pass(0.03, asked=8, rounds=8), WAY_S)
    others = [a_pass(0.006, asked=2, rounds=8), a_pass(0.03, reads_prompt=True), a_pass(0.03, asked=8, rounds=8)]
    assert all(plan_lag.pass_over(one, WAY_S) for one in others)


def test_what_plain_passes_reach_leaves_waits_out_that_end_with_the_news() -> None:
    rates, plan_lag = MeasuredRates(), PlanLagFilter()
    for _ in range(8):
        for record in [*[a_pass(0.03, asked=1)] * 8, *[a_pass(one) for one in (0.008, 0.013, 0.006, 0.006)]]:
            rates.add(record, 1, is_settled=True, ran_as_planned=plan_lag.pass_over(record, WAY_S))
    assert rates.plain.tokens_per_s(1) == pytest.approx(1 / 0.006)
