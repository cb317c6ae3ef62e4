"""Kinds of a model's layers, for people."""

from __future__ import annotations

from collections import Counter
from typing import Any

from transformers import PreTrainedModel

from verifier_svc.layers.experts import replaced_experts
from verifier_svc.layers.registry import kind_of, recurrent_modules

# Layer types of transformers that are not attention; recurrent layers are known by their modules.
_OTHERS = ("linear_attention", "conv", "mamba", "mlp", "moe")


def layer_kinds(model: PreTrainedModel) -> dict[str, int]:
    """Number of a model's layers of each kind; a layer can have several."""
    config: Any = model.config.get_text_config()
    usual = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    types = getattr(config, "layer_types", None) or [usual] * config.num_hidden_layers
    # Hybrid layers have attention and a recurrent layer side by side.
    attention = [kind.replace("hybrid", "full_attention") for kind in types if kind not in _OTHERS]
    kinds = Counter(kind.replace("_", " ") for kind in attention)
    kinds.update(kind.kind for module in recurrent_modules(model) if (kind := kind_of(module)) is not None)
    if experts := replaced_experts(model):
        kinds["mixture of experts"] = len(experts)
    return dict(kinds)
