"""Compiled RMS norms, one call each."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from coppice.kernels.cpu.half_tables import FloatArray
from coppice.kernels.cpu.lane_sums import LANES
from coppice.kernels.cpu.norms import exact_rms_norm

# Largest difference from the model's own norm that counts as rounding, for values of about 1.
_TOLERANCE = 1e-5
_TRIED_ROWS = 3
# Some models store weights minus 1.
_OFFSETS = (0.0, 1.0)


class CompiledNorm(nn.Module):
    """RMS norm over the last axis, times a weight plus `offset`, in single precision on a CPU."""

    def __init__(self, weight: Tensor, epsilon: float, offset: float) -> None:
        super().__init__()
        self.weight = weight
        # A copy: a part of the checkpoint's mapped file would keep all of it in memory.
        self.numbers = (weight.detach() + offset).numpy()
        self.epsilon = epsilon

    def forward(self, values: Tensor) -> Tensor:
        """`values` [..., width] to the same shape."""
        rows = values.contiguous().numpy().reshape(-1, len(self.numbers))
        return torch.from_numpy(self.of(rows)).view(values.shape)

    def of(self, rows: FloatArray) -> FloatArray:
        """`rows` [N, width] to the same shape."""
        result = np.empty_like(rows)
        exact_rms_norm(rows, self.numbers, self.epsilon, result)
        return result


@torch.inference_mode()
def compile_norms(model: nn.Module) -> int:
    """Replace a model's RMS norms in single precision on a CPU; returns the number replaced.

    Recognised by name and by result, since models implement them in their own classes.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (norm := _compiled(child)) is not None:
                setattr(parent, name, norm)
                replaced += 1
    return replaced


def _compiled(module: nn.Module) -> CompiledNorm | None:
    """The compiled norm; None for other modules."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or isinstance(module, CompiledNorm):
        return None
    # Norms without weights may have a tensor of that name, of another width.
    if not isinstance(weight, nn.Parameter) or not isinstance(epsilon, float) or weight.dim() != 1:
        return None
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or len(weight) % LANES:
        return None
    rows = torch.randn(_TRIED_ROWS, len(weight), generator=torch.Generator().manual_seed(len(weight)))
    expected = module(rows)
    for offset in _OFFSETS:
        norm = CompiledNorm(weight, epsilon, offset)
        difference = (norm(rows) - expected).abs().max().item()
        if difference <= _TOLERANCE * max(1.0, (weight + offset).abs().max().item()):
            return norm
    return None
