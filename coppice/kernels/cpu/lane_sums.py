"""Sums and maxima of many numbers, in an order that is written down. Compiled without leave to change it.

Each loop runs over independent numbers side by side (lanes), which become vectors; what is added up is added in the
order of the text, so that the same inputs give the same bits wherever they stand.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.kernels.cpu.compiler import compiled_exactly

FloatArray = npt.NDArray[np.float32]

# Partial sums of a long sum: position p goes to lane p mod LANES.
LANES = 16


@compiled_exactly
def lane_sum(numbers: FloatArray) -> np.float32:
    """The sum of `numbers` [a multiple of LANES]: one partial sum per lane, then these pairwise."""
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
    """The largest of `numbers` [a multiple of LANES]."""
    lanes = np.full(LANES, np.float32(-np.inf))
    for start in range(0, len(numbers), LANES):
        some = numbers[start : start + LANES]
        for lane in range(LANES):
            lanes[lane] = max(lanes[lane], some[lane])
    return np.float32(lanes.max())
