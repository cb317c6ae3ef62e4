"""Every sum is taken in the order that is written down, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest

from verifier_svc.exact_math import (
    LANES,
    add_products,
    add_products_of_four,
    exponentials,
    lane_max,
    lane_sum,
    score_block,
    score_block_of_four,
)
from verifier_svc.kv_cache import BLOCK_SIZE

F = np.float32


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Of very different sizes, so that another order gives other bits."""
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(shape) * 10.0 ** generator.uniform(-3, 3, shape)).astype(F)


@pytest.mark.parametrize("size", [1, 7, 8, 20, 64])
def test_scores_are_added_in_order(size: int) -> None:
    query, page = numbers(size), numbers(size, BLOCK_SIZE, seed=1)
    scores = np.full(BLOCK_SIZE, np.nan, F)
    score_block(query, page, scores)
    expected = np.zeros(BLOCK_SIZE, F)
    for place in range(size):
        expected = expected + query[place] * page[place]
    assert (scores == expected).all()
    backwards = np.zeros(BLOCK_SIZE, F)
    for place in reversed(range(size)):
        backwards = backwards + query[place] * page[place]
    assert size == 1 or (backwards != expected).any(), "the numbers can tell"


@pytest.mark.parametrize("size", [4, 20, 64])
def test_scores_of_four_rows_at_once_are_those_of_four_rows_one_by_one(size: int) -> None:
    queries, page = numbers(4, size), numbers(size, BLOCK_SIZE, seed=1)
    scores = np.full((4, 3 * BLOCK_SIZE), 7, F)
    expected = scores.copy()
    for row in range(4):
        score_block(queries[row], page, expected[row, BLOCK_SIZE : 2 * BLOCK_SIZE])
    score_block_of_four(queries, page, scores, BLOCK_SIZE)
    assert (scores == expected).all()


@pytest.mark.parametrize("count", [0, 1, 3, 4, 9, 64])
def test_products_are_added_in_order(count: int) -> None:
    weights, values, sums = numbers(count), numbers(64, 20, seed=1), numbers(20, seed=2)
    expected = sums.copy()
    for key in range(count):
        expected = expected + weights[key] * values[key]
    add_products(weights, values, sums)
    assert (sums == expected).all()


def test_four_rows_at_once_are_four_rows_one_by_one() -> None:
    weights, values, sums = numbers(4, 64), numbers(64, 20, seed=1), numbers(4, 20, seed=2)
    expected = sums.copy()
    for row in range(4):
        add_products(weights[row], values, expected[row])
    add_products_of_four(weights, values, sums)
    assert (sums == expected).all()


def test_a_lane_sum_goes_by_lanes_and_then_by_halves() -> None:
    values = numbers(5 * LANES)
    lanes = np.zeros(LANES, F)
    for row in values.reshape(5, LANES):
        lanes = lanes + row
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    assert lane_sum(values) == lanes[0]
    assert lane_sum(np.concatenate([values, np.zeros(LANES, F)])) == lanes[0], "zeros behind the end change nothing"
    assert lane_max(values) == values.max()


def test_exponentials_are_right_to_six_digits_wherever_they_stand() -> None:
    values = np.linspace(-90, 2, 4001, dtype=F)
    results = values.copy()
    exponentials(results, F(2))
    exact = np.exp(np.maximum(values.astype(np.float64) - 2, -87))
    assert np.allclose(results, exact, rtol=2e-6)
    hidden = np.array([-np.inf], F)
    exponentials(hidden, F(0))
    assert hidden[0] < 1e-37
    for offset in (1, 5, 17):
        part = values[offset : offset + 100].copy()
        exponentials(part, F(2))
        assert (part == results[offset : offset + 100]).all()
