"""Kinds of a model's layers, for people and for refusals."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from verifier_svc.layers.experts import packed_experts


def layer_kinds(model: PreTrainedModel) -> list[str]:
    """A model's kinds of layers with their numbers, as in "2 full attention"."""
    config: Any = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    kinds = [f"{types.count(kind)} {kind.replace('_', ' ')}" for kind in dict.fromkeys(types)]
    if experts := packed_experts(model):
        kinds.append(f"{len(experts)} mixture of experts")
    return kinds
