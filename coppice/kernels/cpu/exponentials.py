"""exp of many numbers at once, vectorised by the compiler.

exp(x) = 2^n * exp(f) with integer n and |f| <= ln 2 / 2, exp(f) by its series. Such loops compile to vector code,
unlike calls of the library's exp. There are two versions because a function has one set of floating-point flags: with
or without reordering.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.kernels.cpu.compiler import compiled, compiled_exactly
from coppice.kernels.cpu.vector_code import number_of

FloatArray = npt.NDArray[np.float32]

_LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts; the first has few bits, so its product with an integer is exact.
_LN_2_HIGH = np.float32(0.693359375)
_LN_2_LOW = np.float32(-2.12194440e-4)
_LOWEST, _HIGHEST = np.float32(-87), np.float32(88)
# Of 32 bits, so that the loop stays in vectors of 32 bits.
_EXPONENT_BIAS = np.int32(127)
_FRACTION_BITS = np.int32(23)
_C2, _C3, _C4, _C5, _C6 = (np.float32(1 / number) for number in (2, 6, 24, 120, 720))


@compiled
def exponentials(values: FloatArray) -> None:
    """exp of every value [n], in place, to six digits; clamped at exp(-87)."""
    for index in range(len(values)):
        x = min(max(values[index], _LOWEST), _HIGHEST)
        n = np.floor(x * _LOG2_E + np.float32(0.5))
        f = x - n * _LN_2_HIGH - n * _LN_2_LOW
        series = ((((_C6 * f + _C5) * f + _C4) * f + _C3) * f + _C2) * f + np.float32(1)
        values[index] = (series * f + np.float32(1)) * number_of((np.int32(n) + _EXPONENT_BIAS) << _FRACTION_BITS)


@compiled_exactly
def exact_exponentials(numbers: FloatArray, highest: np.float32) -> None:
    """exp(number - highest) of every number [n], none above `highest`, in place, to six digits.

    Clamped at exp(-87). Bits of a result do not depend on its position.
    """
    for index in range(len(numbers)):
        x = max(numbers[index] - highest, _LOWEST)
        n = np.floor(x * _LOG2_E + np.float32(0.5))
        f = x - n * _LN_2_HIGH - n * _LN_2_LOW
        series = ((((_C6 * f + _C5) * f + _C4) * f + _C3) * f + _C2) * f + np.float32(1)
        numbers[index] = (series * f + np.float32(1)) * number_of((np.int32(n) + _EXPONENT_BIAS) << _FRACTION_BITS)
