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
