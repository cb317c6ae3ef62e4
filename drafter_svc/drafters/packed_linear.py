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
# A single row through a small weight is faster unpacked: the packed call costs about 10 us more to make.
_SMALL_WEIGHT = 600_000
_TOLERANCE = 1e-4
# Up to here 8-bit weights are faster than packed ones; measured on 1 to 16 rows.
FEW_ROWS = 4
_SMALLEST_SCALE = 1e-8
# torch's 8-bit kernel reads whole vectors: it runs past the end of narrower or crooked rows.
_INT8_WIDTH = 64


def make_linear(weight: Tensor, *, int8_few_rows: bool = False) -> Linear:
    """A function [rows, in] -> [rows, out] for a weight [out, in].

    Packs float32 weights on the CPU: a matrix of a few rows then costs about what one row costs. With `int8_few_rows`,
    up to FEW_ROWS rows go through weights of 8 bits: a draft step reads every weight for a row or four, from memory
    that the target's pass has just swept clean, so that its time is the size of its weights.
    """
    weight = weight.detach().contiguous()
    if int8_few_rows and weight.shape[1] % _INT8_WIDTH == 0:
        return _int8_few_rows(weight, make_linear(weight))
    packed = _pack(weight) if weight.device.type == "cpu" and weight.dtype == torch.float32 else None
    if packed is None:
        return lambda rows: F.linear(rows, weight)
    if weight.numel() > _SMALL_WEIGHT:
        return packed
    return lambda rows: packed(rows) if rows.shape[0] > 1 else F.linear(rows, weight)


def _int8_few_rows(weight: Tensor, otherwise: Linear) -> Linear:
    """Symmetric 8-bit weights with one scale per output; activations in bfloat16."""
    scales = (weight.abs().amax(1) / 127).clamp_min(_SMALLEST_SCALE)
    quantised = (weight / scales[:, None]).round().to(torch.int8)
    scales = scales.bfloat16()
    multiply = torch.ops.aten._weight_int8pack_mm

    def linear(rows: Tensor) -> Tensor:
        if rows.shape[0] > FEW_ROWS:
            return otherwise(rows)
        result: Tensor = multiply(rows.bfloat16(), quantised, scales).float()
        return result

    return linear


def _pack(weight: Tensor) -> Linear | None:
    # Private operators, though those that torch's own inductor emits: absent or wrong ones must not stop us.
    try:
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        multiply = torch.ops.mkldnn._linear_pointwise

        def linear(rows: Tensor) -> Tensor:
            result: Tensor = multiply(rows, blocked, None, "none", [], "")
            return result

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
