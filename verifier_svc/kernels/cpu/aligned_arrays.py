"""Arrays aligned to cache lines: a vector of sixteen numbers fills one, and loads slower across two."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from coppice.kernels.cpu.compiler import compiled_exactly

FloatArray = npt.NDArray[np.float32]

# Numbers in a cache line.
_LINE = 16
_BYTES_PER_NUMBER = 4


def aligned_zeros(*shape: int) -> FloatArray:
    """Zeros of a shape, aligned; pages never written use no memory."""
    size = math.prod(shape)
    numbers = np.zeros(size + _LINE, np.float32)
    start = -(numbers.ctypes.data // _BYTES_PER_NUMBER) % _LINE
    return numbers[start : start + size].reshape(shape)


@compiled_exactly
def aligned_rows(rows: int, columns: int) -> FloatArray:
    """Empty aligned array [rows, columns] for compiled code; rows are aligned too if `columns` is a multiple of 16."""
    numbers = np.empty(rows * columns + _LINE, np.float32)
    start = -(numbers.ctypes.data // _BYTES_PER_NUMBER) % _LINE
    return numbers[start : start + rows * columns].reshape(rows, columns)
