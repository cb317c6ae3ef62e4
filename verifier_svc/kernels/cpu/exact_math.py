"""Inner loops of the compiled attention, with the order of every sum written down. Compiled without leave to change it.

Each loop runs over independent numbers side by side (keys, values' columns, lanes), which become vectors; what is
added up is added in the order of the text, so that the same inputs give the same bits wherever they stand.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.kernels.compiler import compiled_exactly

FloatArray = npt.NDArray[np.float32]

# Partial sums of a long sum: position p goes to lane p mod LANES.
LANES = 16

_LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts: the first has so few bits that its product with a whole number is exact.
_LN_2_HIGH = np.float32(0.693359375)
_LN_2_LOW = np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87)
_EXPONENT_BIAS = 127
_FRACTION_BITS = 23
_C2, _C3, _C4, _C5, _C6 = (np.float32(1 / number) for number in (2, 6, 24, 120, 720))


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


@compiled_exactly
def exponentials(numbers: FloatArray, highest: np.float32) -> None:
    """exp(number - highest) of every number [n], none above the highest, in place and to six digits.

    Below -87 it stays at exp(-87). exp(x) = 2^n * exp(f) with a whole n and |f| <= ln 2 / 2, exp(f) by its series.
    """
    exponents = np.empty(len(numbers), np.int32)
    for index in range(len(numbers)):
        x = max(numbers[index] - highest, _LOWEST)
        n = np.floor(x * _LOG2_E + np.float32(0.5))
        f = x - n * _LN_2_HIGH - n * _LN_2_LOW
        series = ((((_C6 * f + _C5) * f + _C4) * f + _C3) * f + _C2) * f + np.float32(1)
        numbers[index] = series * f + np.float32(1)
        exponents[index] = (np.int32(n) + _EXPONENT_BIAS) << _FRACTION_BITS
    powers = exponents.view(np.float32)
    for index in range(len(numbers)):
        numbers[index] *= powers[index]
