"""Products with bfloat16 tables, compiled, on the calling thread.

Reading the tables from memory takes longer than the arithmetic; a library's threads would wait for a core.
"""

from __future__ import annotations

from typing import Any

import numba.core.types
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.extending import intrinsic

from coppice.kernels.cpu.compiler import compiled
from coppice.kernels.cpu.half_tables import FloatArray, HalfArray

IntArray = npt.NDArray[np.int64]


def _number(_typing: Any, half: Any) -> Any:
    """Single-precision number from the bits of a bfloat16, its upper half."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(arguments[0], word), word(16)), ir.FloatType())

    return numba.core.types.float32(half), generate


# For compiled code only.
number: Any = intrinsic(_number)


@compiled
def scores_behind(
    scores: FloatArray, rows: IntArray, before: FloatArray, behind: HalfArray, sigmas: FloatArray
) -> FloatArray:
    """(scores[rows] + before times behind) / sigmas [n, vocab].

    Args:
        scores: [depths, vocab].
        rows: indices into `scores` [n].
        before: [n, rank].
        behind: [rank, vocab].
        sigmas: [n].
    """
    result = np.empty((len(rows), scores.shape[1]), np.float32)
    for index in range(len(rows)):
        result[index] = scores[rows[index]]
        add_multiples(behind, before[index], result[index])
        result[index] /= sigmas[index]
    return result


@compiled
def add_multiples(table: HalfArray, factors: FloatArray, result: FloatArray) -> None:
    """Add each row of a table [rows, n], times its factor [rows], to numbers [n], in place."""
    row = 0
    while row + 4 <= len(factors):
        # Four at a time: `result` is loaded and stored each time.
        a, b, c, d = table[row], table[row + 1], table[row + 2], table[row + 3]
        by_a, by_b, by_c, by_d = factors[row], factors[row + 1], factors[row + 2], factors[row + 3]
        for column in range(len(result)):
            first = by_a * number(a[column]) + by_b * number(b[column])
            result[column] += first + by_c * number(c[column]) + by_d * number(d[column])
        row += 4
    while row < len(factors):
        halves, factor = table[row], factors[row]
        for column in range(len(result)):
            result[column] += factor * number(halves[column])
        row += 1
