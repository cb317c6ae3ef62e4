"""Layers of gated short convolutions (LFM2)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from verifier_svc.layers.causal_convolution import CausalConvolution


class ShortConvolution:
    """Output = project(gate x convolution(other gate x values)), see `RecurrentLayer`."""

    kind: ClassVar[str] = "short convolution"
    modules: ClassVar[frozenset[str]] = frozenset({"Lfm2ShortConv", "Lfm2MoeShortConv"})

    def __init__(self, module: Any) -> None:
        self._module = module
        self._convolution = CausalConvolution(module.conv.weight, module.conv.bias)
        self.recurrences = (self._convolution,)

    def forward(self, hidden_states: Tensor, *_arguments: object, **_named: object) -> Tensor:
        """`hidden_states` [1, N, hidden] to [1, N, hidden]."""
        before, behind, values = self._module.in_proj(hidden_states)[0].chunk(3, -1)
        output: Tensor = self._module.out_proj((behind * self._convolution(before * values))[None])
        return output
