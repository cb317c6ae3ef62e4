"""The ends of early scoring, compiled: norms of the rows that have children, and a product for each child."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from coppice.kernels.cpu.compiler import compiled

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@compiled
def normed_parents(
    hidden: FloatArray, parent_rows: IntArray, weight: FloatArray, bias: FloatArray, is_centred: bool, eps: float
) -> tuple[FloatArray, IntArray]:
    """LayerNorm where `is_centred`, else RMSNorm, of rows of `hidden` [N, hidden], each row once.

    Returns what comes of them [P, hidden], and for each of `parent_rows` [C] its place there.
    """
    size = hidden.shape[1]
    places = np.full(hidden.shape[0], -1, np.int64)
    found = np.empty(len(parent_rows), np.int64)
    num_parents = 0
    for index, row in enumerate(parent_rows):
        if places[row] < 0:
            places[row] = num_parents
            num_parents += 1
        found[index] = places[row]
    result = np.empty((num_parents, size), np.float32)
    for row in range(hidden.shape[0]):
        place = places[row]
        if place < 0:
            continue
        mean = np.float32(0)
        if is_centred:
            for column in range(size):
                mean += hidden[row, column]
            mean /= np.float32(size)
        square = np.float32(0)
        for column in range(size):
            value = hidden[row, column] - mean
            square += value * value
        factor = np.float32(1 / math.sqrt(square / size + eps))
        for column in range(size):
            result[place, column] = (hidden[row, column] - mean) * factor * weight[column] + bias[column]
    return result, found


@compiled
def pair_scores(
    rows: FloatArray, added: FloatArray, places: IntArray, table: FloatArray, token_ids: IntArray
) -> FloatArray:
    """Products of (rows + added) [P, hidden] at `places` [C] with the table's rows [V, hidden] of the tokens [C]."""
    result = np.empty(len(places), np.float32)
    for index in range(len(places)):
        place, token = places[index], token_ids[index]
        total = np.float32(0)
        for column in range(rows.shape[1]):
            total += (rows[place, column] + added[place, column]) * table[token, column]
        result[index] = total
    return result
