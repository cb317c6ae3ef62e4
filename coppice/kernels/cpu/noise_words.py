"""The words of `noise.philox4x32` for a block of positions, compiled: the same bits, in a tenth of the time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.kernels.cpu.compiler import compiled_exactly

_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


@compiled_exactly
def noise_words(
    seed_low: np.uint64, seed_high: np.uint64, first_position: np.uint64, num_positions: int, groups: int
) -> npt.NDArray[np.uint32]:
    """Words [num_positions, groups, 4] of the counters that `noise` defines: a group is four token ids."""
    words = np.empty((num_positions, groups, 4), np.uint32)
    for row in range(num_positions):
        position = first_position + np.uint64(row)
        low, high = position & _LOW, position >> _SHIFT
        for group in range(groups):
            c0, c1, c2, c3 = np.uint64(group), low, high, np.uint64(0)
            k0, k1 = seed_low, seed_high
            for _ in range(_ROUNDS):
                product0, product1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
                c0, c2 = (product1 >> _SHIFT) ^ c1 ^ k0, (product0 >> _SHIFT) ^ c3 ^ k1
                c1, c3 = product1 & _LOW, product0 & _LOW
                k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
            words[row, group, 0] = c0
            words[row, group, 1] = c1
            words[row, group, 2] = c2
            words[row, group, 3] = c3
    return words
