"""Products from panels are chains of fused multiply-adds, to the last bit."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from coppice.kernels.cpu.amx import MULTIPLIES_TILES
from coppice.kernels.cpu.half_tables import floats, halves
from coppice.kernels.cpu.vector_code import MULTIPLIES_HALVES
from tests.unit.verifier_svc.oracles import multiply_add
from verifier_svc.kernels.cpu.panel_products import (
    PANEL,
    begin_products,
    byte_pair_panels,
    byte_panels,
    end_products,
    float_panels,
    multiply,
    multiply_panel,
    packed_panels,
    pair_panels,
)

F = np.float32
NO_BIASES = np.empty(0, F)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Of very different sizes, so that another order gives other bits."""
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(shape) * 10.0 ** generator.uniform(-3, 3, shape)).astype(F)


def rounded(number: Fraction) -> np.float32:
    """The nearest number in single precision, ties to even, of one that is neither tiny nor huge."""
    if not number:
        return F(0)
    exponent = abs(number.numerator).bit_length() - number.denominator.bit_length()
    if Fraction(2) ** exponent > abs(number):
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    return F(float(round(number / unit) * unit))


def by_definition(row: np.ndarray, weights: np.ndarray, chain: int) -> np.float32:
    """One sum: every product is added exactly, and rounded once."""
    total = F(0)
    for begin in range(0, len(row), chain):
        part = F(0)
        for factor, weight in zip(row[begin : begin + chain], weights[begin : begin + chain], strict=True):
            part = rounded(Fraction(float(part)) + Fraction(float(factor)) * Fraction(float(weight)))
        total = F(total + part)
    return total


def by_multiply_add(row: np.ndarray, weights: np.ndarray, chain: int) -> np.ndarray:
    """All sums, as the products of other tests are told."""
    total = np.zeros(len(weights), F)
    for begin in range(0, len(row), chain):
        part = np.zeros(len(weights), F)
        for index in range(begin, min(len(row), begin + chain)):
            part = multiply_add(part, np.full_like(part, row[index]), weights[:, index], is_fused=True)
        total += part
    return total


@pytest.mark.parametrize("chain", [30, 12])
def test_every_sum_is_a_chain(chain: int) -> None:
    rows, weights = numbers(1, 30), halves(numbers(PANEL, 30, seed=1))
    result = np.empty((1, PANEL), F)
    multiply(rows, packed_panels(weights), chain, NO_BIASES, result)
    expected = [by_definition(rows[0], floats(weights)[output], chain) for output in range(PANEL)]
    assert (result[0] == expected).all()
    in_doubles = by_multiply_add(rows[0], floats(weights), chain)
    assert (in_doubles == expected).all(), "two ways to round once"
    other = [by_definition(rows[0][::-1], floats(weights)[output][::-1], chain) for output in range(PANEL)]
    assert (result[0] != other).any(), "the numbers can tell"


@pytest.mark.parametrize("outputs", [1, PANEL - 1, PANEL, 2 * PANEL + 5])
@pytest.mark.parametrize("num_rows", range(1, 15))
def test_a_row_has_the_same_bits_in_any_company(num_rows: int, outputs: int) -> None:
    """In tiles of every number of rows, and in panels that are not full."""
    rows, weights, biases = numbers(num_rows, 70), halves(numbers(outputs, 70, seed=1)), numbers(outputs, seed=2)
    panels = packed_panels(weights)
    result, alone = np.full((num_rows, outputs), np.nan, F), np.empty((1, outputs), F)
    multiply(rows, panels, 32, biases, result)
    for row in range(num_rows):
        multiply(rows[row : row + 1], panels, 32, NO_BIASES, alone)
        assert (result[row] == alone[0] + biases).all()
    assert np.allclose(result, rows.astype(np.float64) @ floats(weights).T + biases, rtol=1e-4, atol=1.0)


def test_every_output_has_its_own_weights() -> None:
    """One row of a unit matrix at a time gives back one column of the weights."""
    weights = halves(numbers(2 * PANEL + 3, 9))
    result = np.empty((9, len(weights)), F)
    multiply(np.eye(9, dtype=F), packed_panels(weights), 9, NO_BIASES, result)
    assert (result == floats(weights).T).all()


@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 7, 13])
@pytest.mark.parametrize("kind", ["single", "bfloat16", "bytes"])
def test_panels_of_every_kind_are_one_chain(kind: str, num_rows: int) -> None:
    rows, weights = numbers(num_rows, 70), numbers(2 * PANEL, 70, seed=1)
    scales, biases = NO_BIASES, numbers(2 * PANEL, seed=2)
    if kind == "single":
        panels: np.ndarray = float_panels(weights)
    elif kind == "bfloat16":
        weights, panels = floats(halves(weights)), packed_panels(halves(weights))
    else:
        weights, scales = np.clip(np.rint(weights), -127, 127).astype(F), np.abs(numbers(2 * PANEL, seed=3))
        panels = byte_panels(weights.astype(np.int8))
    result = np.full((num_rows, 2 * PANEL), np.nan, F)
    for panel in range(2):
        multiply_panel(rows, panels, panel, scales, biases, result, 0)
    factors = scales if len(scales) else F(1)
    for row in range(num_rows):
        assert (result[row] == by_multiply_add(rows[row], weights, 70) * factors + biases).all()


def in_tiles(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """All sums by Intel's description of the tiles' products: 32 inputs at a time, even and odd ones apart."""
    total = np.zeros((len(rows), len(weights)), F)
    for begin in range(0, rows.shape[1], 32):
        parts = [np.zeros_like(total), np.zeros_like(total)]
        for index in range(begin, begin + 32):
            factor, weight = np.broadcast_arrays(rows[:, index, None], weights[None, :, index])
            parts[index % 2] = multiply_add(parts[index % 2], factor, weight, is_fused=True)
        total += parts[0] + parts[1]
    return total


@pytest.mark.skipif(not MULTIPLIES_TILES, reason="needs the processor's products of bfloat16 tiles")
@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 31, 32, 33, 50])
@pytest.mark.parametrize("kind", ["bfloat16", "bytes"])
def test_products_in_tiles_have_the_described_bits_in_any_company(kind: str, num_rows: int) -> None:
    rows, weights = halves(numbers(num_rows, 96)), numbers(2 * PANEL, 96, seed=1)
    if kind == "bfloat16":
        weights = floats(halves(weights))
        panels: np.ndarray = pair_panels(halves(weights))
    else:
        weights = np.clip(np.rint(40 * weights), -127, 127).astype(F)
        panels = byte_pair_panels(weights.astype(np.int8))
    result = np.full((num_rows, 2 * PANEL), np.nan, F)
    begin_products(rows, panels)
    for panel in range(2):
        multiply_panel(rows, panels, panel, NO_BIASES, NO_BIASES, result, 0)
    end_products(rows, panels)
    expected = in_tiles(floats(rows), weights)
    assert (result == expected).all()
    in_pairs = floats(rows).astype(np.float64) @ weights.T.astype(np.float64)
    assert np.allclose(result, in_pairs, rtol=1e-4, atol=1.0)


@pytest.mark.skipif(not MULTIPLIES_HALVES, reason="needs the processor's products of bfloat16")
@pytest.mark.parametrize("num_inputs", [64, 70])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 7, 13])
def test_pairs_of_bytes_are_pairs_of_the_same_numbers(num_rows: int, num_inputs: int) -> None:
    """Bit for bit what panels of bfloat16 give, as integers of 8 bits are exact in it."""
    rows = halves(numbers(num_rows, num_inputs))
    weights = np.clip(np.rint(40 * numbers(2 * PANEL, num_inputs, seed=1)), -127, 127).astype(F)
    weights[0, :4] = -127, 127, 1, -1
    scales, biases = np.abs(numbers(2 * PANEL, seed=3)), numbers(2 * PANEL, seed=2)
    results = []
    for panels in (byte_pair_panels(weights.astype(np.int8)), pair_panels(halves(weights))):
        result = np.full((num_rows, 2 * PANEL), np.nan, F)
        begin_products(rows, panels)
        for panel in range(2):
            multiply_panel(rows, panels, panel, scales, biases, result, 0)
        end_products(rows, panels)
        results.append(result)
    assert (results[0] == results[1]).all()
    exact = floats(rows).astype(float) @ weights.T.astype(float) * scales + biases
    # Large products may cancel: a sum is as exact as they are.
    size = np.abs(floats(rows)) @ np.abs(weights.T) * scales + np.abs(biases)
    assert (np.abs(results[0] - exact) <= 1e-6 * size).all()
