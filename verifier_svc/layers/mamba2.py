"""Layers of Mamba-2 (arXiv 2405.21060; Granite 4, Bamba, Nemotron-H, Falcon-H1, Mamba-2)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from verifier_svc.layers.causal_convolution import CausalConvolution
from verifier_svc.layers.linear_recurrence import linear_recurrence


class Mamba2:
    """Convolution of values, keys (B) and queries (C), the recurrence, and a gated norm, see `RecurrentLayer`.

    Steps are clamped in every row, as transformers does in prompts.
    """

    kind: ClassVar[str] = "Mamba-2"
    modules: ClassVar[frozenset[str]] = frozenset(
        {"GraniteMoeHybridMambaLayer", "BambaMixer", "NemotronHMamba2Mixer", "FalconH1Mixer", "Mamba2Mixer"}
    )

    def __init__(self, module: Any) -> None:
        self._module = module
        key_size = module.n_groups * module.ssm_state_size
        self._parts = [module.intermediate_size, module.conv_dim, module.num_heads]
        self._sizes = [module.intermediate_size, key_size, key_size]
        self._convolution = CausalConvolution(module.conv1d.weight, module.conv1d.bias)
        self._recurrence = linear_recurrence(
            module.A_log.device, module.num_heads, module.ssm_state_size, module.head_dim, corrects=False
        )
        self._rates = module.A_log.detach().float().exp()
        self.recurrences = (self._convolution, self._recurrence)

    def forward(self, hidden_states: Tensor, *_arguments: object, **_named: object) -> Tensor:
        """`hidden_states` [1, N, hidden] to [1, N, hidden]."""
        module = self._module
        gates, mixed, steps = self._projected(hidden_states).split(self._parts, -1)
        mixed = module.act(self._convolution(mixed[0]))
        values, keys, queries = mixed.split(self._sizes, -1)
        values = values.unflatten(-1, (-1, module.head_dim))
        keys, queries = (part.unflatten(-1, (module.n_groups, -1)) for part in (keys, queries))
        steps = F.softplus(steps[0].float() + module.dt_bias).clamp(*module.time_step_limit)
        decays = torch.exp(steps * -self._rates)
        result = self._recurrence(queries, keys, values, decays[..., None], steps[..., None])
        result = (result + values * module.D[:, None]).flatten(1)[None]
        # Falcon-H1 has a norm or a plain gate.
        is_normed = getattr(module, "mamba_rms_norm", True)
        normed = module.norm(result, gates) if is_normed else result * F.silu(gates)
        output: Tensor = module.out_proj(normed.to(hidden_states.dtype))
        return output

    def _projected(self, hidden_states: Tensor) -> Tensor:
        """Gates, channels of the convolution, and steps [1, N, sizes]."""
        module = self._module
        if not hasattr(module, "mup_vector"):
            projected: Tensor = module.in_proj(hidden_states)
            return projected
        scaled: Tensor = module.in_proj(hidden_states * module.ssm_in_multiplier) * module.mup_vector
        return scaled
