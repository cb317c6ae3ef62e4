"""exp of many numbers at once, compiled to vectors.

exp(x) = 2^n * exp(f) with a whole n and |f| <= ln 2 / 2, exp(f) by its series: loops that compile to vectors, which
calls of the library's own exp do not. There are two of them since one function has machine code of one kind: with or
without leave to reorder.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.kernels.cpu.compiler import compiled, compiled_exactly

FloatArray = npt.NDArray[np.float32]

_LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts: the first has so few bits that its product with a whole number is exact.
_LN_2_HIGH = np.float32(0.693359375)
_LN_2_LOW = np.float32(-2.12194440e-4)
_LOWEST, _HIGHEST = np.float32(-87), np.float32(88)
_EXPONENT_BIAS = 127
_FRACTION_BITS = 23
_C2, _C3, _C4, _C5, _C6 = (np.float32(1 / number) for number in (2, 6, 24, 120, 720))


@compiled
def exponentials(values: FloatArray) -> None:
    """exp of every value [n], in place and to six digits; below -87 it stays at exp(-87)."""
    exponents = np.empty(len(values), np.int32)
    for index in range(len(values)):
        x = min(max(values[index], _LOWEST), _HIGHEST)
        n = np.floor(x * _LOG2_E + np.float32(0.5))
        f = x - n * _LN_2_HIGH - n * _LN_2_LOW
        series = ((((_C6 * f + _C5) * f + _C4) * f + _C3) * f + _C2) * f + np.float32(1)
        values[index] = series * f + np.float32(1)
        exponents[index] = (np.int32(n) + _EXPONENT_BIAS) << _FRACTION_BITS
    powers = exponents.view(np.float32)
    for index in range(len(values)):
        values[index] *= powers[index]


@compiled_exactly
def exact_exponentials(numbers: FloatArray, highest: np.float32) -> None:
    """exp(number - highest) of every number [n], none above the highest, in place and to six digits.

    Below -87 it stays at exp(-87). A number's result is the same bits wherever it stands.
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
