"""Products with tables in bfloat16, compiled, on the thread that asks for them.

Tables are read from memory for every draft, and that takes longer than what is computed of them; a library's own
threads would wait for a processor.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.compiler import compiled
from coppice.half_tables import FloatArray, HalfArray

IntArray = npt.NDArray[np.int64]


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
        unpack(behind[place], bits)
        for index in range(len(rows)):
            add_multiple(numbers, before[index, place], result[index])
    for index in range(len(rows)):
        result[index] /= sigmas[index]
    return result


@compiled
def unpack(halves: HalfArray, bits: npt.NDArray[np.uint32]) -> None:
    """The bits [n] in single precision of numbers in bfloat16 [n]."""
    for column in range(len(bits)):
        bits[column] = np.uint32(halves[column]) << np.uint32(16)


@compiled
def add_multiple(numbers: FloatArray, factor: np.float32, result: FloatArray) -> None:
    """Add numbers [n] times a factor to others [n], in place."""
    for column in range(len(result)):
        result[column] += factor * numbers[column]
