"""Sums and maxima in a fixed order, compiled without reordering.

Loops run over independent numbers (lanes), which become vectors; additions are in source order, so equal inputs give
equal bits at any position.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.kernels.cpu.compiler import compiled_exactly

FloatArray = npt.NDArray[np.float32]

# Partial sums: position p belongs to lane p mod LANES.
LANES = 16


@compiled_exactly
def lane_sum(numbers: FloatArray) -> np.float32:
    """Sum of `numbers` [a multiple of LANES]: one partial sum per lane, then pairwise."""
    lanes = np.zeros(LANES, np.float32)
    for start in range(0, len(numbers), LANES):
        some = numbers[start : start + LANES]
        for lane in range(LANES):
            lanes[lane] += some[lane]
    width = LANES // 2
    while width > 0:
        for lane in range(width):
            lanes[lane] += lanes[lane + width]
        width //= 2
    return np.float32(lanes[0])


@compiled_exactly
def lane_max(numbers: FloatArray) -> np.float32:
    """Maximum of `numbers` [a multiple of LANES]."""
    lanes = np.full(LANES, np.float32(-np.inf))
    for start in range(0, len(numbers), LANES):
        some = numbers[start : start + LANES]
        for lane in range(LANES):
            lanes[lane] = max(lanes[lane], some[lane])
    return np.float32(lanes.max())
