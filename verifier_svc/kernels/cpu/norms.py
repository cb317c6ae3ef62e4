"""RMS norms of a model as one compiled call each."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coppice.kernels.cpu.lane_sums import LANES
from coppice.kernels.cpu.norms import exact_rms_norm

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
        exact_rms_norm(rows.reshape(-1, width), self._weight, self._epsilon, result.numpy().reshape(-1, width))
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
