"""exp of many numbers at once, compiled to vectors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.kernels.compiler import compiled

FloatArray = npt.NDArray[np.float32]

_LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts: the first has so few bits that its product with a whole number is exact.
_LN_2_HIGH = np.float32(0.693359375)
_LN_2_LOW = np.float32(-2.12194440e-4)
_LOWEST, _HIGHEST = np.float32(-87), np.float32(88)
_EXPONENT_BIAS = 127
_FRACTION_BITS = 23


@compiled
def exponentials(values: FloatArray) -> None:
    """exp of every value [n], in place and to six digits; below -87 it stays at exp(-87).

    exp(x) = 2^n * exp(f) with a whole n and |f| <= ln 2 / 2, exp(f) by its series: a loop that compiles to vectors,
    which calls of the library's own exp do not.
    """
    exponents = np.empty(len(values), np.int32)
    for index in range(len(values)):
        x = min(max(values[index], _LOWEST), _HIGHEST)
        n = np.floor(x * _LOG2_E + np.float32(0.5))
        f = x - n * _LN_2_HIGH - n * _LN_2_LOW
        series = np.float32(1 / 720)
        series = series * f + np.float32(1 / 120)
        series = series * f + np.float32(1 / 24)
        series = series * f + np.float32(1 / 6)
        series = series * f + np.float32(0.5)
        series = series * f + np.float32(1)
        values[index] = series * f + np.float32(1)
        exponents[index] = (np.int32(n) + _EXPONENT_BIAS) << _FRACTION_BITS
    powers = exponents.view(np.float32)
    for index in range(len(values)):
        values[index] *= powers[index]
