"""Costs of passes, learned from passes whose costs are known."""

from __future__ import annotations

import random

import pytest

from orchestrator.planner.pass_costs import PassCosts

OWN_S, ROUND_S, ROW_S, PROMPT_S = 0.005, 0.0004, 0.0002, 0.00015


def add(costs: PassCosts, rng: random.Random, *, slow: float = 1.0) -> tuple[float, float]:
    """A pass; returns its seconds without the prompt's rows, and what is made of it."""
    rounds = rng.randrange(4, 12)
    asked = rng.randrange(rounds + 1)
    nodes, prompt = sum(rng.randrange(8) for _ in range(asked)), rng.choice([0, 0, 0, 200])
    usual_s = OWN_S + ROUND_S * rounds + ROW_S * nodes
    seconds = slow * (usual_s + PROMPT_S * prompt) * rng.uniform(0.95, 1.05)
    return usual_s, costs.add(rounds, nodes, asked, rounds + nodes + prompt, rounds, seconds)


def learned(num_passes: int = 200) -> tuple[PassCosts, random.Random]:
    costs, rng = PassCosts(), random.Random(1)
    for _ in range(num_passes):
        add(costs, rng)
    return costs, rng


def test_a_row_costs_what_it_adds_whatever_else_is_in_the_pass() -> None:
    costs, _ = learned()
    assert costs.row_s == pytest.approx(ROW_S, rel=0.1)


def test_what_prompts_take_is_left_out() -> None:
    costs, rng = learned()
    for _ in range(50):
        usual_s, made_of_it = add(costs, rng)
        assert made_of_it == pytest.approx(usual_s, rel=0.2, abs=0.0015)


def test_a_pass_delayed_by_something_else_counts_as_three_at_most() -> None:
    costs, rng = learned()
    usual_s, made_of_it = add(costs, rng, slow=60.0)
    assert made_of_it < 4 * (usual_s + 200 * PROMPT_S)
    for _ in range(100):
        add(costs, rng)
    assert costs.row_s == pytest.approx(ROW_S, rel=0.3)


def test_nothing_is_known_at_first_and_no_row_costs_less_than_nothing() -> None:
    costs = PassCosts()
    assert costs.row_s == 0
    for number in range(100):
        costs.add(4, number % 8, 4, 4 + number % 8, 4, 0.01 - 0.0001 * (number % 8))
    assert costs.row_s == 0


def test_a_cost_without_recent_variation_is_kept() -> None:
    costs, rng = learned()
    for _ in range(300):
        rounds = rng.randrange(4, 12)
        costs.add(rounds, 0, 0, rounds, rounds, (OWN_S + ROUND_S * rounds) * rng.uniform(0.95, 1.05))
    assert costs.row_s == pytest.approx(ROW_S, rel=0.3)


@pytest.mark.parametrize("more_s", [0.0, 0.0003])
def test_tokens_bear_the_mean_of_what_prompts_take_with_and_without_drafts(more_s: float) -> None:
    costs, rng = PassCosts(), random.Random(1)
    assert costs.other_s == (0.0, 0.0)
    for _ in range(400):
        # A prompt of 200 rows for each 64 tokens; drafting and not in turn.
        rounds, is_asking, prompt = 8, rng.random() < 0.5, 200 if rng.random() < 1 / 8 else 0
        seconds = OWN_S + ROUND_S * rounds + (PROMPT_S + more_s * is_asking) * prompt
        costs.add(rounds, 0, rounds * is_asking, rounds + prompt, rounds, seconds * rng.uniform(0.95, 1.05))
    per_token = 200 / 64
    assert costs.other_s[0] == pytest.approx(PROMPT_S * per_token, rel=0.25)
    assert costs.other_s[1] == pytest.approx((PROMPT_S + more_s) * per_token, rel=0.25)
