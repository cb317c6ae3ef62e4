"""RMS norms as one call each, compiled: as tensor operations they are eight, a tenth of a small pass.

Each row is added up by itself and in an order that is written down (`exact_math.lane_sum`), so that its bits do not
depend on the rows beside it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from coppice.kernels.compiler import compiled_exactly
from coppice.kernels.half_tables import FloatArray
from verifier_svc.kernels.cpu.exact_math import LANES, lane_sum

# Largest difference to the model's own norm that still counts as rounding, beside numbers of about 1.
_TOLERANCE = 1e-5
_TRIED_ROWS = 3


class CompiledNorm(nn.Module):
    """Root mean square normalization over the last axis, times a weight, in single precision on a CPU."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self._weight = weight.detach().numpy()
        self._epsilon = epsilon

    def forward(self, values: Tensor) -> Tensor:
        """`values` [..., width] to the same shape."""
        result = torch.empty(values.shape)
        rows, width = values.contiguous().numpy(), len(self._weight)
        normalize(rows.reshape(-1, width), self._weight, self._epsilon, result.numpy().reshape(-1, width))
        return result


@torch.inference_mode()
def compile_norms(model: nn.Module) -> int:
    """Replace the RMS norms of a model in single precision on a CPU; returns how many were replaced.

    What is one is told by its name and by what it computes, since models write it in ways of their own.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (norm := _compiled(child)) is not None:
                setattr(parent, name, norm)
                replaced += 1
    return replaced


@compiled_exactly
def normalize(rows: FloatArray, weight: FloatArray, epsilon: float, result: FloatArray) -> None:
    """Every row over the root of its mean square, times `weight`.

    Args:
        rows: [N, width], the width a multiple of LANES.
        weight: [width].
        epsilon: added to the mean square.
        result: [N, width], written.
    """
    width = len(weight)
    for index in range(len(rows)):
        row, normalized = rows[index], result[index]
        for column in range(width):
            normalized[column] = row[column] * row[column]
        mean = lane_sum(normalized) / np.float32(width)
        scale = np.float32(1) / np.sqrt(mean + np.float32(epsilon))
        for column in range(width):
            normalized[column] = weight[column] * (row[column] * scale)


def _compiled(module: nn.Module) -> CompiledNorm | None:
    """The same as one call; None for everything else."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or isinstance(module, CompiledNorm):
        return None
    if not isinstance(weight, Tensor) or not isinstance(epsilon, float) or weight.dim() != 1:
        return None
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or len(weight) % LANES:
        return None
    norm = CompiledNorm(weight, epsilon)
    rows = torch.randn(_TRIED_ROWS, len(weight), generator=torch.Generator().manual_seed(len(weight)))
    difference = (norm(rows) - module(rows)).abs().max().item()
    return norm if difference <= _TOLERANCE * max(1.0, weight.abs().max().item()) else None
