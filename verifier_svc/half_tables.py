"""Tables in bfloat16 for loops that numpy has no such type for: the upper halves of the bits of single precision."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

HalfArray = npt.NDArray[np.uint16]


def halves(table: Tensor) -> HalfArray:
    """A table, rounded to bfloat16 and contiguous."""
    bits = table.detach().cpu().to(torch.bfloat16).contiguous().view(torch.int16)
    return bits.numpy().view(np.uint16)


def floats(table: HalfArray) -> npt.NDArray[np.float32]:
    """The numbers of such a table."""
    return (table.astype(np.uint32) << 16).view(np.float32)
