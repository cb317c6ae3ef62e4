"""RMS norms of rows, compiled: as tensor operations they are eight, a tenth of a small pass.

Each row is added up by itself and in an order that is written down (`lane_sums.lane_sum`), so that its bits do not
depend on the rows beside it.
"""

from __future__ import annotations

import numpy as np

from coppice.kernels.cpu.compiler import compiled_exactly
from coppice.kernels.cpu.half_tables import FloatArray
from coppice.kernels.cpu.lane_sums import lane_sum


@compiled_exactly
def rms_norm(rows: FloatArray, weight: FloatArray, epsilon: float, result: FloatArray) -> None:
    """Every row over the root of its mean square, times `weight`.

    Args:
        rows: [N, width].
        weight: [width].
        epsilon: added to the mean square.
        result: [N, width], written; another array than `rows`.
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
