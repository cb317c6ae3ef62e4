"""Layers of Mamba (arXiv 2312.00752; Jamba, Falcon-Mamba, Mamba)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from verifier_svc.layers.causal_convolution import CausalConvolution
from verifier_svc.layers.linear_recurrence import linear_recurrence

# Channels of a head, if they are a multiple of so many: those of a head are computed in turn, and heads in parallel.
_HEAD_CHANNELS = 64


class Mamba:
    """Convolution of the channels, the recurrence of each, and a gate, see `RecurrentLayer`.

    A state has a column for each channel; keys (B) and queries (C) are the same for all.
    """

    kind: ClassVar[str] = "Mamba-1"
    modules: ClassVar[frozenset[str]] = frozenset({"JambaMambaMixer", "FalconMambaMixer", "MambaMixer"})

    def __init__(self, module: Any) -> None:
        self._module = module
        channels, size = module.A_log.shape
        self._num_heads = channels // _HEAD_CHANNELS if channels % _HEAD_CHANNELS == 0 else 1
        rates = module.A_log.detach().float().exp().unflatten(0, (self._num_heads, -1)).transpose(1, 2)
        self._convolution = CausalConvolution(module.conv1d.weight, module.conv1d.bias)
        self._recurrence = linear_recurrence(
            rates.device, self._num_heads, size, channels // self._num_heads, corrects=False, rates=rates
        )
        self.recurrences = (self._convolution, self._recurrence)

    def forward(self, hidden_states: Tensor, *_arguments: object, **_named: object) -> Tensor:
        """`hidden_states` [1, N, hidden] to [1, N, hidden]."""
        module = self._module
        mixed, gates = module.in_proj(hidden_states).chunk(2, -1)
        values = module.act(self._convolution(mixed[0]))
        size = module.ssm_state_size
        parts = module.x_proj(values).split([module.time_step_rank, size, size], -1)
        # Jamba and Falcon-Mamba have norms.
        names = ("dt_layernorm", "b_layernorm", "c_layernorm")
        steps, keys, queries = (
            getattr(module, name, lambda rows: rows)(part) for name, part in zip(names, parts, strict=True)
        )
        steps = F.softplus(module.dt_proj(steps).float()).unflatten(-1, (self._num_heads, -1))
        by_head = values.unflatten(-1, (self._num_heads, -1))
        result = self._recurrence(queries[:, None], keys[:, None], by_head, steps, steps).flatten(1)
        gated = (result + values * module.D) * module.act(gates[0])
        output: Tensor = module.out_proj(gated[None].to(hidden_states.dtype))
        return output
