"""Mixtures of experts on CPUs: a row's result does not depend on which experts other rows chose.

An expert's products are packed linear layers, whose rows do not depend on their number as long as that is a multiple
of `ROW_MULTIPLE`. The weighted results of a row are added one after the other, in the router's order. Rows of padding
choose no expert, since every expert chosen costs the traffic of its weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifier_svc.engine.pass_plan import ROW_MULTIPLE
from verifier_svc.kernels.cpu.packed_layers import Pack, PackedLinear, packed_for_onednn

# Experts that get their rows sorted.
_SORTED = frozenset({"Llama4TextExperts"})
# The interface of transformers' experts (`use_experts_implementation`).
_MARKS = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")


class PackedExperts(nn.Module):
    """Replacement for experts with the interface of transformers: weights [experts, out, in], in one tensor each.

    `num_rows` is the number of rows of the current pass without padding.
    """

    def __init__(self, experts: Any, up: Iterable[PackedLinear], down: Iterable[PackedLinear]) -> None:
        """`up` and `down` are the products of every expert; activation and gate are those of `experts`."""
        super().__init__()
        self.experts = experts
        self.up, self.down = nn.ModuleList(up), nn.ModuleList(down)
        self._gate = experts._apply_gate if experts.has_gate else experts.act_fn
        self.num_rows = 0

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`hidden_states` [N, hidden], each row's experts [N, k] and their weights, to [N, hidden]."""
        num_rows, num_chosen = self.num_rows, top_k_index.shape[1]
        chosen = top_k_index[:num_rows].flatten()
        results = hidden_states.new_empty(num_rows * num_chosen, hidden_states.shape[1])
        order = torch.argsort(chosen, stable=True)
        counts = torch.bincount(chosen, minlength=len(self.up)).tolist()
        for expert, places in enumerate(order.split(counts)):
            if len(places):
                rows = hidden_states[places // num_chosen]
                results[places] = self._outputs(expert, rows)
        weighted = results.view(num_rows, num_chosen, -1) * top_k_weights[:num_rows, :, None]
        output = torch.zeros_like(hidden_states)
        for choice in range(num_chosen):
            output[:num_rows] += weighted[:, choice]
        return output

    def _outputs(self, expert: int, rows: Tensor) -> Tensor:
        count = len(rows)
        even = F.pad(rows, (0, 0, 0, -count % ROW_MULTIPLE))
        outputs: Tensor = self.down[expert](self._gate(self.up[expert](even)))
        return outputs[:count]


class PackedSortedExperts(nn.Module):
    """Replacement for experts that get the rows of a pass once for each expert, zero where it was not chosen (Llama 4).

    `num_rows` as in `PackedExperts`.
    """

    def __init__(self, experts: Any, up: Iterable[PackedLinear], down: Iterable[PackedLinear]) -> None:
        """`up` and `down` are the products of every expert; the activation is that of `experts`."""
        super().__init__()
        self.experts = experts
        self.up, self.down = nn.ModuleList(up), nn.ModuleList(down)
        self.num_rows = 0

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`hidden_states` [experts * N, hidden] to the same shape."""
        output = torch.zeros_like(hidden_states)
        size = len(hidden_states) // len(self.up)
        for expert in range(len(self.up)):
            rows = hidden_states[expert * size : expert * size + self.num_rows]
            places = rows.any(-1).nonzero()[:, 0]
            if count := len(places):
                even = F.pad(rows[places], (0, 0, 0, -count % ROW_MULTIPLE))
                gate, up = self.up[expert](even).chunk(2, -1)
                output[expert * size + places] = self.down[expert](up * self.experts.act_fn(gate))[:count]
        return output


def pack_experts(model: nn.Module, pack: Pack = packed_for_onednn) -> int:
    """Replace all modules of experts of a model in single precision on a CPU; returns the number replaced.

    Products are made by `pack`. Experts of other interfaces are left alone.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (packed := _packed(child, pack)) is not None:
                setattr(parent, name, packed)
                replaced += 1
    return replaced


def packed_experts(model: nn.Module) -> list[PackedExperts | PackedSortedExperts]:
    """The replaced experts of a model."""
    return [module for module in model.modules() if isinstance(module, PackedExperts | PackedSortedExperts)]


def _packed(module: Any, pack: Pack) -> PackedExperts | PackedSortedExperts | None:
    if type(module).__name__ in _SORTED:
        up, down = _products(module, "gate_up_proj", pack), _products(module, "down_proj", pack)
        return None if up is None or down is None else PackedSortedExperts(module, up, down)
    if not all(hasattr(module, mark) for mark in _MARKS) or module.has_post_expert_norm:
        return None
    name = "gate_up_proj" if module.has_gate else "up_proj"
    up, down = _products(module, name, pack), _products(module, "down_proj", pack)
    return None if up is None or down is None else PackedExperts(module, up, down)


def _products(module: Any, name: str, pack: Pack) -> list[PackedLinear] | None:
    """Packed products of every expert with its part of a weight; None without them."""
    weights, biases = getattr(module, name), getattr(module, f"{name}_bias", None)
    # A tensor-parallel weight is not a plain parameter.
    if type(weights) is not nn.Parameter or weights.dtype != torch.float32 or weights.device.type != "cpu":
        return None
    layers = []
    for expert in range(len(weights)):
        weight = (
            weights.data[expert].t().contiguous() if getattr(module, "is_transposed", True) else weights.data[expert]
        )
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=biases is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if biases is not None:
            linear.bias = nn.Parameter(biases.data[expert], requires_grad=False)
        product = pack(linear)
        if product is None:
            return None
        layers.append(PackedLinear(linear, product))
    return layers
