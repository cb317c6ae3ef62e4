"""Mixtures of experts on GPUs in strict mode: a row's result does not depend on which experts other rows chose.

Choices are sorted by expert on the device and cut into tiles of one size, whose products are a Triton kernel's
(`kernels/triton/experts.py`); import fails without Triton. Results of a row are added as on CPUs (`experts.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from verifier_svc.kernels.triton.experts import multiply_tiles
from verifier_svc.layers.experts import ReplacedExperts, added_choices, gated, has_known_interface, up_name

_ROWS, _COLUMNS, _DEPTH = 16, 64, 32


class TiledExperts(ReplacedExperts):
    """Replacement for experts with the interface of transformers, whose weights it uses in place."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`hidden_states` [N, hidden], each row's experts [N, k] and their weights, to [N, hidden]."""
        chosen = top_k_index[: self.num_rows]
        tiles = _Tiles(chosen.flatten(), len(self.experts.down_proj))
        mixed = self._product(hidden_states[: self.num_rows], up_name(self.experts), tiles, chosen.shape[1])
        results = self._product(gated(self.experts, mixed), "down_proj", tiles, 1)
        return added_choices(results.view(*chosen.shape, -1), top_k_weights, hidden_states)

    def _product(self, inputs: Tensor, name: str, tiles: _Tiles, num_chosen: int) -> Tensor:
        weights, biases = getattr(self.experts, name), getattr(self.experts, f"{name}_bias", None)
        is_transposed = self.experts.is_transposed
        size = weights.shape[2 if is_transposed else 1]
        output = inputs.new_empty(len(tiles.order), size)
        multiply_tiles[(len(tiles.experts), -(-size // _COLUMNS))](
            # A copy begins at an aligned address: for others Triton would compile other code.
            inputs.clone(memory_format=torch.contiguous_format),
            weights,
            weights if biases is None else biases,
            tiles.order,
            tiles.experts,
            tiles.firsts,
            tiles.stops,
            output,
            CHOSEN=num_chosen,
            INPUTS=inputs.shape[1],
            OUTPUTS=size,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            DEPTH=_DEPTH,
            IS_TRANSPOSED=is_transposed,
            HAS_BIASES=biases is not None,
            num_warps=4,
            num_stages=2,
            # The default differs among versions of Triton.
            enable_fp_fusion=False,
        )
        return output


class _Tiles:
    """Choices in tiles of one expert each, see `multiply_tiles`. Nothing is read by the host."""

    def __init__(self, chosen: Tensor, num_experts: int) -> None:
        """`chosen` [choices] are experts."""
        self.order = torch.argsort(chosen, stable=True)
        counts = torch.zeros(num_experts, dtype=torch.long, device=chosen.device)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        num_tiles = (counts + _ROWS - 1) // _ROWS
        stops_of_tiles, stops = num_tiles.cumsum(0), counts.cumsum(0)
        # At most so many, each but the last of an expert being full.
        most = min(len(chosen), len(chosen) // _ROWS + num_experts)
        tile = torch.arange(most, device=chosen.device)
        self.experts = torch.searchsorted(stops_of_tiles, tile, right=True).clamp(max=num_experts - 1)
        place = tile - (stops_of_tiles - num_tiles)[self.experts]
        self.firsts = (stops - counts)[self.experts] + place * _ROWS
        self.stops = torch.minimum(self.firsts + _ROWS, stops[self.experts])


def tile_experts(model: nn.Module) -> int:
    """Replace all modules of experts of a known interface; returns the number replaced."""
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _can_be_tiled(child):
                setattr(parent, name, TiledExperts(child))
                replaced += 1
    return replaced


def _can_be_tiled(module: Any) -> bool:
    if not has_known_interface(module):
        return False
    weights = [getattr(module, up_name(module)), module.down_proj]
    return all(type(weight) is nn.Parameter and weight.is_contiguous() for weight in weights)
