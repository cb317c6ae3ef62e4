"""What passes cost by themselves, learned from passes of a modelled cost."""

from __future__ import annotations

import math

import numpy as np
import pytest

from verifier_svc.engine.pass_cost import PassCost


@pytest.mark.parametrize(("own_s", "row_s"), [(0.005, 0.000165), (0.006, 0.000004), (0.5, 0.02)])
def test_the_cost_of_noisy_passes_is_found(own_s: float, row_s: float) -> None:
    generator = np.random.default_rng(0)
    cost = PassCost()
    for _ in range(400):
        rows = int(generator.integers(1, 600))
        cost.add(rows, (own_s + row_s * rows) * float(generator.normal(1, 0.02)))
    assert cost.own_rows == pytest.approx(own_s / row_s, rel=0.25)


def test_nothing_is_known_before_passes_of_several_sizes_ran() -> None:
    cost = PassCost()
    for _ in range(1000):
        cost.add(100, 0.11)
    assert cost.own_rows == 0
    for rows in (20, 200) * 20:
        cost.add(rows, 0.01 + 0.001 * rows)
    assert cost.own_rows == pytest.approx(10)


def test_what_was_known_stays_while_passes_of_one_size_run() -> None:
    cost = PassCost()
    for rows in (10, 100, 300) * 20:
        cost.add(rows, 0.01 + 0.001 * rows)
    assert cost.own_rows == pytest.approx(10)
    for _ in range(10_000):
        cost.add(64, 0.01 + 0.001 * 64)
    assert cost.own_rows == pytest.approx(10)


def test_a_pass_that_was_held_up_hardly_counts() -> None:
    cost = PassCost()
    for index in range(300):
        rows = (10, 100, 300)[index % 3]
        held_up = 50.0 if index == 290 else 1.0
        cost.add(rows, held_up * (0.01 + 0.001 * rows))
    assert cost.own_rows == pytest.approx(10, rel=0.5)


def test_a_machine_that_becomes_slower_is_learned_anew() -> None:
    cost = PassCost()
    for factor, own_s in ((1.0, 0.01), (8.0, 0.2)):
        for rows in (10, 100, 300) * 400:
            cost.add(rows, own_s + factor * 0.001 * rows)
    assert cost.own_rows == pytest.approx(25, rel=0.05)


def test_rows_that_cost_nothing_leave_room_for_any_number() -> None:
    cost = PassCost()
    for rows in (10, 100, 300) * 20:
        cost.add(rows, 0.01 - 1e-6 * rows)
    assert cost.own_rows == math.inf
