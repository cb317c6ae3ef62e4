"""Low-rank products of a handful of rows, compiled: a library takes longer to be handed them than to carry them out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.compiler import compiled
from coppice.half_products import add_multiples, number
from coppice.half_tables import FloatArray, HalfArray

IntArray = npt.NDArray[np.int64]


@compiled
def add_low_rank(values: FloatArray, rows: IntArray, down: HalfArray, up: HalfArray, result: FloatArray) -> None:
    """Add up times down times a layer's inputs to its outputs, in place, for some rows.

    Args:
        values: the inputs [N, in].
        rows: which rows.
        down: [rank, in].
        up: [rank, out].
        result: the outputs [N, out].
    """
    factors = np.empty((len(rows), len(down)), np.float32)
    for place in range(len(down)):
        halves = down[place]
        for index in range(len(rows)):
            factors[index, place] = _product(halves, values[rows[index]])
    for index in range(len(rows)):
        add_multiples(up, factors[index], result[rows[index]])


@compiled
def _product(halves: HalfArray, numbers: FloatArray) -> np.float32:
    total = np.float32(0)
    for column in range(len(halves)):
        total += number(halves[column]) * numbers[column]
    return total
