"""Mixtures of experts on CPUs: a row's result does not depend on which experts other rows chose.

An expert's products are packed linear layers, whose rows do not depend on their number as long as that is a multiple
of `ROW_MULTIPLE`. The weighted results of a row are added one after the other, in the router's order. Rows of padding
choose no expert, since every expert chosen costs the traffic of its weights. On GPUs: `tiled_experts.py`.
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


class ReplacedExperts(nn.Module):
    """Replacement for a module of experts; `num_rows` is the number of rows of the current pass without padding."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.experts = experts
        self.num_rows = 0


class PackedExperts(ReplacedExperts):
    """Replacement for experts with the interface of transformers: weights [experts, out, in], in one tensor each."""

    def __init__(self, experts: Any, up: Iterable[PackedLinear], down: Iterable[PackedLinear]) -> None:
        """`up` and `down` are the products of every expert."""
        super().__init__(experts)
        self.up, self.down = nn.ModuleList(up), nn.ModuleList(down)

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
        return added_choices(results.view(num_rows, num_chosen, -1), top_k_weights, hidden_states)

    def _outputs(self, expert: int, rows: Tensor) -> Tensor:
        count = len(rows)
        even = F.pad(rows, (0, 0, 0, -count % ROW_MULTIPLE))
        outputs: Tensor = self.down[expert](gated(self.experts, self.up[expert](even)))
        return outputs[:count]


class PackedSortedExperts(ReplacedExperts):
    """Replacement for experts that get the rows of a pass once for each expert, zero unless they chose it (Llama 4)."""

    def __init__(self, experts: Any, up: Iterable[PackedLinear], down: Iterable[PackedLinear]) -> None:
        """`up` and `down` are the products of every expert."""
        super().__init__(experts)
        self.up, self.down = nn.ModuleList(up), nn.ModuleList(down)

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


def gated(experts: Any, mixed: Tensor) -> Tensor:
    """Outputs [rows, size] of the first product to inputs of the second."""
    inputs: Tensor = (experts._apply_gate if experts.has_gate else experts.act_fn)(mixed)
    return inputs


def added_choices(results: Tensor, weights: Tensor, hidden_states: Tensor) -> Tensor:
    """Weighted sums of results [rows, k, hidden], shaped as `hidden_states` [N, hidden]: zero for rows of padding.

    `weights` are [N, k]. Choices are added one after the other in single precision, and rounded once.
    """
    num_rows = len(results)
    weighted = results.float() * weights[:num_rows, :, None].float()
    output = torch.zeros(hidden_states.shape, device=hidden_states.device)
    for choice in range(results.shape[1]):
        output[:num_rows] += weighted[:, choice]
    return output.to(hidden_states.dtype)


def pack_experts(model: nn.Module, pack: Pack = packed_for_onednn) -> int:
    """Replace all modules of experts of a model in single precision on a CPU; returns the number replaced.

    Products are made by `pack`. Experts of other interfaces are left alone.
    """
    replaced = 0
    for parent in list(model.modules()):
        # What was replaced before keeps its own; its products are packed as linear layers.
        if isinstance(parent, ReplacedExperts):
            continue
        for name, child in list(parent.named_children()):
            if (packed := _packed(child, pack)) is not None:
                setattr(parent, name, packed)
                replaced += 1
    return replaced


def replaced_experts(model: nn.Module) -> list[ReplacedExperts]:
    """The replaced experts of a model."""
    return [module for module in model.modules() if isinstance(module, ReplacedExperts)]


def has_known_interface(module: Any) -> bool:
    """Whether a module is experts with the interface of transformers that is computed here."""
    return all(hasattr(module, mark) for mark in _MARKS) and not module.has_post_expert_norm


def up_name(experts: Any) -> str:
    """Name of the weights of the first product."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def _packed(module: Any, pack: Pack) -> PackedExperts | PackedSortedExperts | None:
    if type(module).__name__ in _SORTED:
        up, down = _products(module, "gate_up_proj", pack), _products(module, "down_proj", pack)
        return None if up is None or down is None else PackedSortedExperts(module, up, down)
    if not has_known_interface(module):
        return None
    up, down = _products(module, up_name(module), pack), _products(module, "down_proj", pack)
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
