"""Linear layers with weights packed for oneDNN, where that is there and right; plain ones elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

Linear = Callable[[Tensor], Tensor]
# One packing serves all row counts; measured on 1 to 64 rows.
_ROWS_HINT = 16
# oneDNN keeps machine code for every count of rows that it has met, a few hundred KiB for each weight: prompts, which
# have any length, would fill its cache with hundreds of MiB. More rows than a draft step's go in multiples.
_FEW_ROWS = 8
ROW_STEP = 16
# A single row through a small weight is faster unpacked: the packed call costs about 10 us more to make.
_SMALL_WEIGHT = 600_000
_TOLERANCE = 1e-4


def make_linear(weight: Tensor) -> Linear:
    """A function [rows, in] -> [rows, out] for a weight [out, in].

    Packs float32 weights on the CPU: a matrix of a few rows then costs about what one row costs.
    """
    weight = weight.detach().contiguous()
    packed = _pack(weight) if weight.device.type == "cpu" and weight.dtype == torch.float32 else None
    if packed is None:
        return lambda rows: F.linear(rows, weight)
    if weight.numel() > _SMALL_WEIGHT:
        return packed
    return lambda rows: packed(rows) if rows.shape[0] > 1 else F.linear(rows, weight)


def _pack(weight: Tensor) -> Linear | None:
    # Private operators, though those that torch's own inductor emits: absent or wrong ones must not stop us.
    try:
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        multiply = torch.ops.mkldnn._linear_pointwise

        def linear(rows: Tensor) -> Tensor:
            count = rows.shape[0]
            missing = -count % ROW_STEP if count > _FEW_ROWS else 0
            padded = F.pad(rows, (0, 0, 0, missing)) if missing else rows
            result: Tensor = multiply(padded, blocked, None, "none", [], "")
            return result[:count]

        generator = torch.Generator().manual_seed(0)
        probe = torch.randn(3, weight.shape[1], generator=generator)
        expected = F.linear(probe, weight)
        worst = (linear(probe) - expected).abs().max().item()
    except (AttributeError, RuntimeError, TypeError) as error:
        logger.info("weights stay unpacked: %s", error)
        return None
    if worst > _TOLERANCE * max(1.0, expected.abs().max().item()):
        logger.warning("weights stay unpacked: packed ones are off by %g", worst)
        return None
    return linear
