"""Low-rank products of a handful of rows, compiled: a library takes longer to be handed them than to carry them out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.compiler import compiled
from coppice.half_products import add_multiple, unpack
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
    bits_in, bits_out = np.empty(down.shape[1], np.uint32), np.empty(up.shape[1], np.uint32)
    down_row, up_row = bits_in.view(np.float32), bits_out.view(np.float32)
    for place in range(down.shape[0]):
        unpack(down[place], bits_in)
        unpack(up[place], bits_out)
        for row in rows:
            factor = _product(down_row, values[row])
            add_multiple(up_row, factor, result[row])


@compiled
def _product(left: FloatArray, right: FloatArray) -> np.float32:
    total = np.float32(0)
    for column in range(len(left)):
        total += left[column] * right[column]
    return total
