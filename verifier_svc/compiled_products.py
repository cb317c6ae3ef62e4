"""Small products on the thread that asks for them, compiled: a library's own threads would wait for a processor.

Tables are read from memory in every pass, and that takes longer than what is computed of them: so they are bfloat16,
kept as the upper halves of the bits of single precision.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.compiler import compiled

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
HalfArray = npt.NDArray[np.uint16]


@compiled
def scores_behind(
    scores: FloatArray, rows: IntArray, before: FloatArray, behind: HalfArray, sigmas: FloatArray
) -> FloatArray:
    """(scores[rows] + before times behind) / sigmas [n, vocab].

    Args:
        scores: [depths, vocab].
        rows: which of them [n].
        before: [n, rank].
        behind: [rank, vocab].
        sigmas: [n].
    """
    result = np.empty((len(rows), scores.shape[1]), np.float32)
    bits = np.empty(scores.shape[1], np.uint32)
    numbers = bits.view(np.float32)
    for index in range(len(rows)):
        result[index] = scores[rows[index]]
    for place in range(before.shape[1]):
        _unpack(behind[place], bits)
        for index in range(len(rows)):
            _add_multiple(numbers, before[index, place], result[index])
    for index in range(len(rows)):
        result[index] /= sigmas[index]
    return result


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
        _unpack(down[place], bits_in)
        _unpack(up[place], bits_out)
        for row in rows:
            factor = _product(down_row, values[row])
            _add_multiple(up_row, factor, result[row])


@compiled
def _unpack(halves: HalfArray, bits: npt.NDArray[np.uint32]) -> None:
    for column in range(len(bits)):
        bits[column] = np.uint32(halves[column]) << np.uint32(16)


@compiled
def _product(left: FloatArray, right: FloatArray) -> np.float32:
    total = np.float32(0)
    for column in range(len(left)):
        total += left[column] * right[column]
    return total


@compiled
def _add_multiple(numbers: FloatArray, factor: np.float32, result: FloatArray) -> None:
    for column in range(len(result)):
        result[column] += factor * numbers[column]
