"""bfloat16 tables, which numpy lacks, as the upper halves of single-precision bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
HalfArray = npt.NDArray[np.uint16]


def halves(table: FloatArray) -> HalfArray:
    """A table of finite numbers rounded to bfloat16 (to nearest, ties to even), contiguous."""
    bits = np.ascontiguousarray(table, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> 16 & 1)
    return (rounded >> 16).astype(np.uint16)


def floats(table: HalfArray) -> FloatArray:
    """Single-precision numbers of such a table."""
    return (table.astype(np.uint32) << 16).view(np.float32)
