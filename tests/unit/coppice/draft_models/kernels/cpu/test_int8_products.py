"""Products with matrices of 8 bits: right for every number of rows, outputs and inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba.core import config

from coppice.draft_models.kernels.cpu import int8_inputs
from coppice.draft_models.kernels.cpu.int8_inputs import arrange, multiply_bytes, round_rows
from coppice.draft_models.kernels.cpu.int8_weights import Weights, multiply_floats, quantise
from coppice.draft_models.kernels.cpu.llama_pass import multiply
from drafter_svc.model.llama_forward import FEW_ROWS, MOST_ROWS, compiled_ways
from tests.eight_bits import needs_int8_inputs

SHAPES = [(1, 1), (7, 5), (40, 33), (16, 64), (33, 4)]


def random_weights(shape: tuple[int, ...], seed: int = 0) -> Weights:
    return quantise(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def random_rows(rows: int, width: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(rows).standard_normal((rows, width)).astype(np.float32)


@pytest.mark.parametrize("rows", [*range(1, FEW_ROWS + 1), 13, MOST_ROWS["w8"]])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_with_floats(shape: tuple[int, int], rows: int) -> None:
    weights, inputs = random_weights(shape, rows), random_rows(rows, shape[1])
    results = np.full((rows, shape[0]), np.nan, np.float32)
    multiply_floats(inputs, weights.values, weights.scales, results)
    expected = inputs.astype(np.float64) @ (weights.values * weights.scales[:, None].astype(np.float64)).T
    assert np.allclose(results, expected, atol=1e-5)


@needs_int8_inputs
@pytest.mark.parametrize("rows", [*range(1, 2 * FEW_ROWS + 2), 33, MOST_ROWS["w8a8"]])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_with_bytes_are_those_of_whole_numbers(shape: tuple[int, int], rows: int) -> None:
    weights, inputs = random_weights(shape, rows), random_rows(rows, shape[1])
    rounded, scales, starts = np.zeros(inputs.shape, np.int8), np.empty(rows, np.float32), np.empty(rows, np.int32)
    round_rows(inputs, rounded, scales, starts)
    results = np.full((rows, shape[0]), np.nan, np.float32)
    arranged = arrange(weights)
    multiply_bytes(inputs, arranged.values, arranged.scales, results)
    sums = rounded.astype(np.int64) @ weights.values.astype(np.int64).T
    assert np.allclose(results, sums * scales[:, None] * weights.scales, rtol=1e-6, atol=0)


@needs_int8_inputs
def test_the_largest_sums_do_not_overflow() -> None:
    inputs = np.ones((1, 16_384), np.float32)
    weights = arrange(quantise(np.full((1, 16_384), -1.0, np.float32)))
    results = np.empty((1, 1), np.float32)
    multiply_bytes(inputs, weights.values, weights.scales, results)
    assert results[0, 0] == pytest.approx(-16_384)


def test_rows_are_within_half_a_step_and_rows_of_zeros_stay_zero() -> None:
    inputs = random_rows(3, 50)
    inputs[1] = 0
    rounded, scales, starts = np.zeros((3, 52), np.int8), np.empty(3, np.float32), np.empty(3, np.int32)
    round_rows(inputs, rounded, scales, starts)
    assert (np.abs(rounded[:, :50] * scales[:, None] - inputs) <= scales[:, None] * 0.5001).all()
    assert not rounded[1].any()
    assert not rounded[:, 50:].any()
    assert np.array_equal(starts, -128 * rounded.sum(1, dtype=np.int32))


def test_arranged_weights_hold_every_weight_once() -> None:
    weights = random_weights((2, 21, 10))
    values = arrange(weights).values
    assert values.shape == (2, 2, 3, 16, 4)
    for layer, output, column in np.ndindex(2, 21, 10):
        value = values[layer, output // 16, column // 4, output % 16, column % 4]
        assert int(value) - 128 == weights.values[layer, output, column]
    assert int((values != 128).sum()) == int((weights.values != 0).sum())


def test_quantised_weights_are_within_half_a_step_and_zero_rows_stay_zero() -> None:
    weight = random_rows(6, 50)
    weight[2] = 0
    values, scales = quantise(weight)
    assert (np.abs(values * scales[:, None] - weight) <= scales[:, None] * 0.5001).all()
    assert not values[2].any()
    assert values.min() >= -127


@pytest.mark.parametrize(("name", "value"), [("CPU_NAME", "generic"), ("CPU_FEATURES", "+sse2")])
def test_code_for_another_machine_has_no_instructions_of_this_one(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, name, value)
    assert not int8_inputs.is_available()
    assert compiled_ways() == ["w8"]


@pytest.mark.parametrize("arranged", [False, pytest.param(True, marks=needs_int8_inputs)])
def test_the_way_of_multiplying_follows_from_the_values(arranged: bool) -> None:
    weights, inputs = random_weights((20, 8)), random_rows(2, 8)
    weights = arrange(weights) if arranged else weights
    results, expected = np.empty((2, 20), np.float32), np.empty((2, 20), np.float32)
    multiply(inputs, *weights, results)
    (multiply_bytes if arranged else multiply_floats)(inputs, *weights, expected)
    assert np.array_equal(results, expected)
