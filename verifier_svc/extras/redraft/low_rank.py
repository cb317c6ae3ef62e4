"""Low-rank products of a few mask rows, compiled: a torch call takes longer than the product."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.kernels.cpu.compiler import compiled
from coppice.kernels.cpu.half_products import add_multiples, number
from coppice.kernels.cpu.half_tables import FloatArray, HalfArray

IntArray = npt.NDArray[np.int64]


@compiled
def add_low_rank(values: FloatArray, rows: IntArray, down: HalfArray, up: HalfArray, result: FloatArray) -> None:
    """Add up times down times a layer's inputs to its outputs, in place, for some rows.

    Args:
        values: inputs [N, in].
        rows: indices of the rows.
        down: [rank, in].
        up: [rank, out].
        result: outputs [N, out].
    """
    factors = np.empty((len(rows), len(down)), np.float32)
    for place in range(len(down)):
        halves = down[place]
        for index in range(len(rows)):
            factors[index, place] = _product(halves, values[rows[index]])
    for index in range(len(rows)):
        add_multiples(up, factors[index], result[rows[index]])


@compiled
def put_inputs(
    token_ids: IntArray, places: IntArray, embeddings: FloatArray, masks: FloatArray, result: FloatArray
) -> IntArray:
    """Write the inputs of all rows; returns the indices of mask rows.

    Args:
        token_ids: of the rows [N].
        places: positions of masks in their groups, -1 for tokens [N].
        embeddings: of tokens [vocab, hidden].
        masks: embeddings of masks by position [places, hidden].
        result: [N, hidden], written.
    """
    rows = np.empty(len(places), np.int64)
    num_masks = 0
    for row in range(len(places)):
        if places[row] < 0:
            result[row] = embeddings[token_ids[row]]
        else:
            result[row] = masks[places[row]]
            rows[num_masks] = row
            num_masks += 1
    return rows[:num_masks]


@compiled
def _product(halves: HalfArray, numbers: FloatArray) -> np.float32:
    total = np.float32(0)
    for column in range(len(halves)):
        total += number(halves[column]) * numbers[column]
    return total
