"""Low-rank products of single rows, compiled, against plain ones in double precision."""

from __future__ import annotations

import numpy as np
import pytest

from coppice.kernels.cpu.half_tables import floats, halves
from verifier_svc.extras.redraft.low_rank import add_low_rank

F = np.float32


def numbers(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


@pytest.mark.parametrize("rows", [[], [3], [0, 2, 4]], ids=len)
def test_low_rank_products_are_added_to_the_rows_that_are_named(rows: list[int]) -> None:
    values, result = numbers(5, 37, seed=1), numbers(5, 50, seed=2)
    down, up = halves(numbers(3, 37, seed=3)), halves(numbers(3, 50, seed=4))
    before = result.copy()
    add_low_rank(values, np.array(rows, np.int64), down, up, result)
    added = values.astype(np.float64) @ floats(down).T @ floats(up)
    for row in range(5):
        if row in rows:
            assert np.allclose(result[row], before[row] + added[row], atol=1e-5)
        else:
            assert (result[row] == before[row]).all()
