"""What the cost model makes of passes that are unlike those that it has to price."""

from __future__ import annotations

import random

import pytest

from orchestrator.planner.cost_model import LEAST_PLAIN_SHARE, CostModel
from orchestrator.planner.passes import PassSample

# Seconds of a pass of one row, of a further row in a small pass, and in one of hundreds.
FIRST_S, ROW_S, PROMPT_ROW_S = 0.016, 0.0011, 0.0004
GAP_S = 0.001


def drafted(rows: int) -> PassSample:
    """A pass of one sequence that had asked for a draft."""
    return PassSample(1, 1, 5, rows, 400, FIRST_S + ROW_S * (rows - 1), GAP_S)


def prompt(rows: int) -> PassSample:
    """A pass that read a prompt, which asks for no draft."""
    return PassSample(1, 0, 1, rows, rows, FIRST_S + PROMPT_ROW_S * (rows - 1), None, reads_prompt=True)


def test_prompts_are_not_taken_for_plain_rounds() -> None:
    chance = random.Random(0)
    costs = CostModel()
    costs.add(prompt(490))
    for number in range(200):
        costs.add(drafted(chance.choice((4, 8, 12, 16))))
        if number % 20 == 19:
            costs.add(prompt(490))
    assert costs.costs.row_s == pytest.approx(ROW_S, rel=0.05)
    # Rows are what passes differ by; nothing is put down to asking for drafts, since all did.
    assert costs.plain_round_s(1, 400) == pytest.approx(FIRST_S + GAP_S, rel=0.1)


def test_what_plain_rounds_take_is_bounded_by_what_drafted_ones_do() -> None:
    costs = CostModel()
    for _ in range(64):
        costs.add(PassSample(1, 1, 5, 8, 400, 0.030, GAP_S))
        # Passes without drafts that are impossibly quick.
        costs.add(PassSample(1, 0, 1, 1, 400, 1e-5, GAP_S))
    assert costs.plain_round_s(1, 400) >= LEAST_PLAIN_SHARE * 0.9 * (0.030 - 7 * costs.costs.row_s)


def test_costs_are_not_known_before_a_round_behind_the_prompts() -> None:
    costs = CostModel()
    costs.add(prompt(490))
    costs.add(PassSample(1, 0, 1, 490, 490, 0.2, GAP_S, reads_prompt=True))
    assert not costs.is_known
    costs.add(drafted(8))
    assert costs.is_known
