"""Layers of the gated delta rule (Gated Delta Networks, arXiv 2412.06464; Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from verifier_svc.layers.causal_convolution import CausalConvolution
from verifier_svc.layers.linear_recurrence import linear_recurrence

# Added to squared lengths of queries and keys.
_EPSILON = 1e-6


class GatedDelta:
    """Convolution of queries, keys and values, the recurrence, and a gated norm, see `RecurrentLayer`."""

    kind: ClassVar[str] = "gated delta rule"
    modules: ClassVar[frozenset[str]] = frozenset(
        {"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"}
    )

    def __init__(self, module: Any) -> None:
        self._module = module
        self._sizes = [module.key_dim, module.key_dim, module.value_dim]
        self._convolution = CausalConvolution(module.conv1d.weight, module.conv1d.bias)
        self._recurrence = linear_recurrence(
            module.A_log.device, module.num_v_heads, module.head_k_dim, module.head_v_dim, corrects=True
        )
        self._rates = module.A_log.detach().float().exp()
        self.recurrences = (self._convolution, self._recurrence)

    def forward(self, hidden_states: Tensor, *_arguments: object, **_named: object) -> Tensor:
        """`hidden_states` [1, N, hidden] to [1, N, hidden]."""
        module = self._module
        mixed, gates, steps, decays = self._projected(hidden_states)
        queries, keys, values = F.silu(self._convolution(mixed)).split(self._sizes, -1)
        queries, keys = (unit(part.unflatten(-1, (-1, module.head_k_dim))) for part in (queries, keys))
        result = self._recurrence(
            queries * module.head_k_dim**-0.5,
            keys,
            values.unflatten(-1, (-1, module.head_v_dim)),
            torch.exp(-self._rates * F.softplus(decays.float() + module.dt_bias))[..., None],
            torch.sigmoid(steps.float())[..., None],
        )
        normed = module.norm(result.flatten(0, 1), gates.reshape(-1, module.head_v_dim))
        output: Tensor = module.out_proj(normed.reshape(*hidden_states.shape[:2], -1))
        return output

    def _projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values in one [N, channels], gates, steps and decays [N, heads], before activations."""
        module = self._module
        if hasattr(module, "in_proj_qkv"):
            layers = module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a
            mixed, gates, steps, decays = (layer(hidden_states)[0] for layer in layers)
            return mixed, gates, steps, decays
        pair = module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states)
        queries, keys, values, gates, steps, decays = (part[0] for part in module.fix_query_key_value_ordering(*pair))
        mixed = torch.cat([part.flatten(1) for part in (queries, keys, values)], -1)
        return mixed, gates, steps, decays


def unit(vectors: Tensor) -> Tensor:
    """Vectors [..., size] of about unit length, in single precision."""
    vectors = vectors.float()
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + _EPSILON)
