"""Products with weights packed once for oneDNN, if available and correct; plain products otherwise.

PyTorch's fp32 matrix product on CPUs costs 1.4 to 1.6 times as much for two rows as for one; with packed weights
eight rows cost about 1.1 times one row, which makes a small tree nearly free.
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
# Largest relative difference to the plain product that counts as rounding.
_TOLERANCE = 1e-4
# oneDNN caches code per row count, a few hundred KiB per weight: prompts of any length would fill hundreds of MiB. Row
# counts above a draft step's are padded to multiples.
_FEW_ROWS = 8
ROW_STEP = 16
# A single row of a small weight is faster unpacked: a packed call costs about 10 us more.
_SMALL_WEIGHT = 600_000


@torch.inference_mode()
def packed_product(weight: Tensor, bias: Tensor | None = None) -> Product | None:
    """Product with a float32 weight [out, in] on a CPU, plus a bias [out]; a few rows cost about as much as one.

    The operators are private to PyTorch, though its inductor emits them. The product is checked against the plain one;
    if the operators are missing or disagree, logs a warning and returns None.
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
        logger.warning("packed products are unavailable, passes of a few rows are slower: %s", error)
        return None
    if difference > _TOLERANCE * max(1.0, expected.abs().max().item()):
        logger.warning("packed products are off by %.2e, using plain ones: passes of a few rows are slower", difference)
        return None
    return product


def make_linear(weight: Tensor) -> Product:
    """Function [rows, in] -> [rows, out] for a weight [out, in] and any row count; packed if that is faster."""
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
