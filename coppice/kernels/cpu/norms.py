"""RMS norms of rows, compiled: as eight tensor operations they take a tenth of a small pass.

Two versions, as for exponentials: one that may reorder sums, for drafts, and a slower one of fixed order, for the
verifier.
"""

from __future__ import annotations

import numpy as np

from coppice.kernels.cpu.compiler import compiled, compiled_exactly
from coppice.kernels.cpu.half_tables import FloatArray
from coppice.kernels.cpu.lane_sums import lane_sum


@compiled
def rms_norm(rows: FloatArray, weight: FloatArray, epsilon: float, result: FloatArray) -> None:
    """Each row divided by its root mean square, times `weight`.

    Args:
        rows: [N, width].
        weight: [width].
        epsilon: added to the mean square.
        result: [N, width], written.
    """
    num_rows, width = rows.shape
    for row in range(num_rows):
        total = np.float32(0)
        for column in range(width):
            total += rows[row, column] * rows[row, column]
        factor = np.float32(1 / np.sqrt(total / width + epsilon))
        for column in range(width):
            result[row, column] = rows[row, column] * factor * weight[column]


@compiled_exactly
def exact_rms_norm(rows: FloatArray, weight: FloatArray, epsilon: float, result: FloatArray) -> None:
    """Like `rms_norm`, with each row summed in a fixed order: bits do not depend on other rows.

    The width must be a multiple of `lane_sums.LANES`, and `result` a different array than `rows`.
    """
    width = len(weight)
    for index in range(len(rows)):
        row, normalized = rows[index], result[index]
        for column in range(width):
            normalized[column] = row[column] * row[column]
        mean = lane_sum(normalized) / np.float32(width)
        scale = np.float32(1) / np.sqrt(mean + np.float32(epsilon))
        for column in range(width):
            normalized[column] = weight[column] * (row[column] * scale)
