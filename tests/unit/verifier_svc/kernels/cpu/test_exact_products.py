"""Products in vector registers are added one after the other, to the last bit, and to nothing but the named sums."""

from __future__ import annotations

import numpy as np
import pytest

from coppice.kernels.cpu.vector_code import HAS_FUSED
from tests.unit.verifier_svc.oracles import multiply_add
from verifier_svc.kernels.cpu.exact_products import Products, add_products

F = np.float32


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Of very different sizes, so that another order gives other bits."""
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(shape) * 10.0 ** generator.uniform(-3, 3, shape)).astype(F)


def one_by_one(
    left: np.ndarray, matrix: np.ndarray, sums: np.ndarray, which: Products, *, backwards: bool
) -> np.ndarray:
    """The same by definition, column by column side by side."""
    result = sums.copy()
    columns = slice(which.column, which.column + which.num_columns)
    for row in range(which.first, which.last):
        total = np.zeros(which.num_columns, F) if backwards else result[row, columns]
        for index in reversed(range(which.num_products)) if backwards else range(which.num_products):
            factor, numbers = left[row, which.factor + index], matrix[which.place + index, : which.num_columns]
            total = multiply_add(total, np.full_like(numbers, factor), numbers, is_fused=HAS_FUSED)
        result[row, columns] = total
    return result


@pytest.mark.parametrize("columns", [1, 16, 20, 64, 80, 128, 150])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8])
def test_products_are_added_in_order(rows: int, columns: int) -> None:
    """Of every number of rows that is taken at once, and of columns in wide tiles, narrow ones and none."""
    left, matrix, sums = numbers(rows, 40), numbers(40, columns, seed=1), numbers(rows, columns, seed=2)
    which = Products(0, rows, 0, columns, 0, 0, 40)
    expected = one_by_one(left, matrix, sums, which, backwards=False)
    assert (expected != one_by_one(left, matrix, sums, which, backwards=True)).any(), "the numbers can tell"
    add_products(left, matrix, sums, which)
    assert (sums == expected).all()


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_parts_are_named_and_nothing_else_is_touched(count: int) -> None:
    left, matrix, sums = numbers(9, 12), numbers(11, 90, seed=1), numbers(9, 200, seed=2)
    which = Products(first=2, last=9, column=70, num_columns=84, factor=6, place=4, num_products=count)
    expected = one_by_one(left, matrix, sums, which, backwards=False)
    add_products(left, matrix, sums, which)
    assert (sums == expected).all()


def test_arrays_may_be_parts_of_others() -> None:
    """As a head's keys are, and rows that lie anywhere."""
    left, matrix, sums = numbers(10, 30)[::2, ::3], numbers(8, 3, 64, seed=1)[:, 1], numbers(5, 100, seed=2)[:, 20:84]
    which = Products(0, 5, 0, 64, 0, 0, 8)
    expected = one_by_one(left, matrix, sums, which, backwards=False)
    add_products(left, matrix, sums, which)
    assert (sums == expected).all()


def test_infinities_stay_what_they_are() -> None:
    """As scores of what a row does not see."""
    left, matrix = np.array([[1, -np.inf]], F), np.ones((2, 16), F)
    sums = np.zeros((1, 16), F)
    add_products(left, matrix, sums, Products(0, 1, 0, 16, 0, 0, 2))
    assert (sums == -np.inf).all()
