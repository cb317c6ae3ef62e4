"""Layers of Kimi Delta Attention (Kimi Linear, arXiv 2510.26692)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from verifier_svc.layers.causal_convolution import CausalConvolution
from verifier_svc.layers.gated_delta import unit
from verifier_svc.layers.linear_recurrence import linear_recurrence


class KimiDelta:
    """Convolution of queries, keys and values, the recurrence, and a gated norm, see `RecurrentLayer`.

    It is the gated delta rule with a decay for each key.
    """

    kind: ClassVar[str] = "Kimi delta rule"
    modules: ClassVar[frozenset[str]] = frozenset({"KimiLinearDeltaAttention"})

    def __init__(self, module: Any) -> None:
        self._module = module
        self._convolution = CausalConvolution(module.conv1d.weight, module.conv1d.bias)
        size = module.head_dim
        self._recurrence = linear_recurrence(module.conv1d.weight.device, module.num_heads, size, size, corrects=True)
        self.recurrences = (self._convolution, self._recurrence)

    def forward(self, hidden_states: Tensor, *_arguments: object, **_named: object) -> Tensor:
        """`hidden_states` [1, N, hidden] to [1, N, hidden]."""
        module = self._module
        mixed = torch.cat([layer(hidden_states)[0] for layer in (module.q_proj, module.k_proj, module.v_proj)], -1)
        parts = F.silu(self._convolution(mixed)).chunk(3, -1)
        queries, keys, values = (part.unflatten(-1, (-1, module.head_dim)) for part in parts)
        decays = torch.exp(module.forget_gate(hidden_states)[0])
        steps = torch.sigmoid(module.b_proj(hidden_states)[0].float())[..., None]
        result = self._recurrence(unit(queries) * module.head_dim**-0.5, unit(keys), values, decays, steps)
        gates = module.g_b_proj(module.g_a_proj(hidden_states)).view(result.shape)
        output: Tensor = module.o_proj(module.o_norm(result, gates).flatten(1)[None])
        return output
