"""EAGLE-3 written down once more, slowly: every row of every path from the checkpoint's tensors, without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def rms(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return weight * rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon)


class EagleOracle:
    """States and logits after paths of drafted tokens, in double precision."""

    def __init__(
        self,
        settings: dict[str, Any],
        tensors: dict[str, Tensor],
        embedding: Tensor,
        output: Tensor,
        ids: Sequence[int],
    ) -> None:
        """`embedding` [V, h]; `output` [N, h] are the rows of `ids`."""
        self._settings, self._layer = settings, settings["transformer_layer_config"]
        self._tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self._embedding, self._output = embedding.double(), output.double()
        self.ids = list(ids)

    def logits(
        self, token_ids: Sequence[int], features: Tensor, positions: Sequence[int], path: Sequence[int]
    ) -> np.ndarray:
        """Logits [N] after committed tokens with features [tokens, F] at their positions, and a path after them."""
        tensors, layer, settings = self._tensors, self._layer, self._settings
        epsilon, hidden = layer["rms_norm_eps"], layer["hidden_size"]
        features = features.double()
        if settings["norm_before_fc"]:
            features = rms(features, tensors["input_norm.weight"], epsilon)
        inputs = list(features @ tensors["fc.weight"].T)
        every, places = [*token_ids, *path], [*positions, *range(positions[-1] + 1, positions[-1] + 1 + len(path))]
        # A drafted token's input is the state of the row before it, so rows come one after the other.
        for count in range(len(token_ids), len(every) + 1):
            states = self._layer_states(torch.stack(inputs), every[:count], places[:count])
            inputs.append(states[-1])
        assert states.shape == (len(every), hidden)
        return (self._output @ rms(states[-1], tensors["norm.weight"], epsilon)).numpy()

    def _layer_states(self, inputs: Tensor, token_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        tensors, layer = self._tensors, self._layer
        epsilon, size = layer["rms_norm_eps"], layer["head_dim"]
        heads, keys = layer["num_attention_heads"], layer["num_key_value_heads"]

        def of(name: str) -> Tensor:
            return tensors[f"layers.0.{name}.weight"]

        tokens = rms(self._embedding[list(token_ids)], of("input_layernorm"), epsilon)
        normed = rms(inputs, of("hidden_norm"), epsilon)
        both = torch.cat([tokens, normed], -1)
        query, key, value = (
            (both @ of(f"self_attn.{name}_proj").T).view(len(both), -1, size).transpose(0, 1) for name in "qkv"
        )
        angles = torch.tensor(positions).double()[:, None] * layer["rope_theta"] ** (
            -torch.arange(0, size, 2).double() / size
        )
        turn = torch.polar(torch.ones_like(angles), angles)

        def turned(rows: Tensor) -> Tensor:
            first, second = rows[..., : size // 2], rows[..., size // 2 :]
            complex_rows = torch.complex(first, second) * turn
            return torch.cat([complex_rows.real, complex_rows.imag], -1)

        seen = []
        for head in range(heads):
            own = head // (heads // keys)
            scores = turned(query)[head] @ turned(key)[own].T / size**0.5
            scores = scores.masked_fill(torch.ones(len(both), len(both)).triu(1).bool(), -torch.inf)
            seen.append(scores.softmax(-1) @ value[own])
        residual = normed if self._settings["norm_before_residual"] else inputs
        states = residual + torch.cat(seen, -1) @ of("self_attn.o_proj").T
        after = rms(states, of("post_attention_layernorm"), epsilon)
        gate, up = after @ of("mlp.gate_proj").T, after @ of("mlp.up_proj").T
        return states + (torch.nn.functional.silu(gate) * up) @ of("mlp.down_proj").T
