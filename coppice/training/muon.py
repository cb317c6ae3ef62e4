"""Muon in float32, for processors without bfloat16 instructions: torch's own always computes in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# RMS of an update, to match AdamW's.
_RMS_OF_ADAMW = 0.2


class Float32Muon(torch.optim.Muon):
    """`torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, with updates orthogonalised in float32.

    In bfloat16 that takes forty times as long on a CPU that has to emulate it: longer than the model's own step.
    State and settings are torch's, so that a saved state fits both.
    """

    def __init__(self, params: Iterable[Tensor], *, weight_decay: float) -> None:
        """`params` are matrices."""
        super().__init__(params, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; `closure` is not used."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient, state, momentum = parameter.grad, self.state[parameter], group["momentum"]
        assert gradient is not None, "parameters without one are left out"
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(mean, momentum) if group["nesterov"] else mean
        update = orthogonalised(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * _RMS_OF_ADAMW * math.sqrt(max(parameter.shape)))


def orthogonalised(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """About U V^T of the matrix's U S V^T, by so many steps of Newton and Schulz (Jordan et al., "Muon", 2024)."""
    a, b, c = coefficients
    found: Tensor = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    found = found / found.norm().clamp(min=eps)
    for _ in range(steps):
        gram = found @ found.mT
        found = a * found + (b * gram + c * gram @ gram) @ found
    return found.mT if matrix.shape[0] > matrix.shape[1] else found
