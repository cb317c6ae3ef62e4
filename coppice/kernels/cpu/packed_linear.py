"""Products with weights packed once for oneDNN, where that is there and right; plain ones elsewhere.

PyTorch's fp32 matrix product on CPUs costs 1.4 to 1.6 times as much for two rows as for one; with packed weights
eight rows cost about 1.1 times one row, which is what makes a small tree nearly free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

# Rows [..., in] to [..., out].
Product: TypeAlias = Callable[[Tensor], Tensor]

# One packing serves all row counts; measured on 1 to 64 rows.
_ROWS_HINT = 16
_TRIED_ROWS = 3
# Largest relative difference to the plain product that still counts as rounding.
_TOLERANCE = 1e-4
# oneDNN keeps machine code for every count of rows that it has met, a few hundred KiB for each weight: prompts, which
# have any length, would fill its cache with hundreds of MiB. More rows than a draft step's go in multiples.
_FEW_ROWS = 8
ROW_STEP = 16
# A single row through a small weight is faster unpacked: the packed call costs about 10 us more to make.
_SMALL_WEIGHT = 600_000


@torch.inference_mode()
def packed_product(weight: Tensor, bias: Tensor | None = None) -> Product | None:
    """The product with a float32 weight [out, in] on a CPU, plus a bias [out]: a few rows cost about what one costs.

    The operators are private to PyTorch, though those that its own inductor emits. The product is compared with the
    plain one once; None, and a warning, where the operators are missing or disagree.
    """
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        multiply = torch.ops.mkldnn._linear_pointwise

        def product(rows: Tensor) -> Tensor:
            result: Tensor = multiply(rows, packed, bias, "none", [], "")
            return result

        rows = torch.randn(_TRIED_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
        expected = F.linear(rows, weight, bias)
        difference = (product(rows) - expected).abs().max().item()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        logger.warning("packed products are not available, passes of a few rows are slower: %s", error)
        return None
    if difference > _TOLERANCE * max(1.0, expected.abs().max().item()):
        logger.warning("packed product is off by %.2e: passes of a few rows take plain ones, slower", difference)
        return None
    return product


def make_linear(weight: Tensor) -> Product:
    """A function [rows, in] -> [rows, out] for a weight [out, in], any count of rows; packed where that is faster."""
    weight = weight.detach().contiguous()
    packed = packed_product(weight) if weight.device.type == "cpu" and weight.dtype == torch.float32 else None
    if packed is None:
        return lambda rows: F.linear(rows, weight)
    is_small = weight.numel() <= _SMALL_WEIGHT

    def linear(rows: Tensor) -> Tensor:
        count = rows.shape[0]
        if count == 1 and is_small:
            return F.linear(rows, weight)
        missing = -count % ROW_STEP if count > _FEW_ROWS else 0
        return packed(F.pad(rows, (0, 0, 0, missing)))[:count] if missing else packed(rows)

    return linear
