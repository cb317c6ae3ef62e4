"""Small products on the thread that asks for them, compiled: a library's own threads would wait for a processor."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.compiler import compiled

FloatArray = npt.NDArray[np.float32]


@compiled
def products(left: FloatArray, right: FloatArray) -> FloatArray:
    """left [rows, rank] times right [rank, columns]."""
    rows, rank = left.shape
    result = np.zeros((rows, right.shape[1]), np.float32)
    for row in range(rows):
        for place in range(rank):
            factor = left[row, place]
            for column in range(right.shape[1]):
                result[row, column] += factor * right[place, column]
    return result


@compiled
def add_low_rank(
    values: FloatArray, rows: npt.NDArray[np.int64], down: FloatArray, up: FloatArray, result: FloatArray
) -> None:
    """Add up times down times a layer's inputs to its outputs, in place, for some rows.

    Args:
        values: the inputs [N, in].
        rows: which rows.
        down: [rank, in].
        up: [rank, out].
        result: the outputs [N, out].
    """
    for row in rows:
        for place in range(down.shape[0]):
            factor = np.float32(0)
            for column in range(down.shape[1]):
                factor += down[place, column] * values[row, column]
            for column in range(up.shape[1]):
                result[row, column] += factor * up[place, column]
