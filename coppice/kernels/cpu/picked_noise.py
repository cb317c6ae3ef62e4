"""Request noise of some token ids, in single precision: for drafts, which need no other bit than the likeliest's order.

The words are those of `noise.philox4x32`; logarithms are series, accurate to seven digits, in loops that vectorise.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.kernels.cpu.compiler import compiled

FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]

_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_TWO_TO_32 = 2.0**32
_LN_2 = 0.6931471805599453
_BIAS, _FRACTION_BITS = 1023, 52
_FRACTION = np.int64((1 << _FRACTION_BITS) - 1)
_ONE = np.int64(_BIAS << _FRACTION_BITS)
_SQRT_2 = 1.4142135623730951


@compiled
def fill_picked_noise(
    seed: np.uint64, position: np.uint64, token_ids: npt.NDArray[np.int64], scale: float, noise: FloatArray
) -> None:
    """`noise` [n] = `scale` times the Gumbel numbers of `token_ids` [n] at an absolute position."""
    count = len(token_ids)
    uniform = np.empty(count, np.float64)
    low, high = position & _LOW, position >> _SHIFT
    for index in range(count):
        token = np.uint64(token_ids[index])
        c0, c1, c2, c3 = token >> np.uint64(2), low, high, np.uint64(0)
        k0, k1 = seed & _LOW, seed >> _SHIFT
        for _ in range(_ROUNDS):
            product0, product1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
            c0, c2 = (product1 >> _SHIFT) ^ c1 ^ k0, (product0 >> _SHIFT) ^ c3 ^ k1
            c1, c3 = product1 & _LOW, product0 & _LOW
            k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
        word = token & np.uint64(3)
        first = c1 if word == 1 else c0
        second = c3 if word == 3 else c2
        chosen = np.int64(second if word >= 2 else first)
        uniform[index] = (np.float64(chosen) + 0.5) / _TWO_TO_32
    for _ in range(2):
        _negated_logarithms(uniform)
    for index in range(count):
        noise[index] = scale * uniform[index]


@compiled
def _negated_logarithms(numbers: DoubleArray) -> None:
    """-log of positive normal numbers [n], in place.

    log(2^e * m) = e * ln 2 + 2 * artanh((m - 1) / (m + 1)) with m near 1.
    """
    bits = numbers.view(np.int64)
    for index in range(len(numbers)):
        exponent = np.float64((bits[index] >> _FRACTION_BITS) - _BIAS)
        bits[index] = (bits[index] & _FRACTION) | _ONE
        fraction = numbers[index]
        is_large = fraction > _SQRT_2
        fraction = fraction * 0.5 if is_large else fraction
        exponent = exponent + 1.0 if is_large else exponent
        ratio = (fraction - 1.0) / (fraction + 1.0)
        square = ratio * ratio
        series = 1.0 + square * (
            1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9 + square * (1 / 11 + square / 13))))
        )
        numbers[index] = -(exponent * _LN_2 + 2.0 * ratio * series)
