"""Traits of attention layers that models do not tell their attention function: chunks, and scales by position.

With chunked attention (Llama 4) a row sees the keys of its own chunk of positions. Layers without rotary positions
scale their queries by position there, which the module does by the row's place in the pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CHUNKED = "chunked_attention"

# Attribute of a module whose scales by position are applied here.
_TEMPERATURE = "coppice_temperature"


@dataclass(frozen=True, slots=True)
class AttentionTraits:
    """Positions per chunk, and positions per step and strength of the scales; None without."""

    chunk: int | None = None
    temperature: tuple[float, float] | None = None

    def scaled(self, query: Tensor, positions: Tensor) -> Tensor:
        """`query` [1, heads, N, dim] times the scale of each row's position [N]."""
        if self.temperature is None:
            return query
        step, strength = self.temperature
        scales = torch.log1p(torch.floor((positions.float() + 1.0) / step)) * strength + 1.0
        return query * scales[:, None]


def attention_traits(model: nn.Module) -> dict[int, AttentionTraits]:
    """Traits of a model's attention layers that have any, by index; their modules no longer scale queries."""
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    chunked = {layer for layer, kind in enumerate(getattr(config, "layer_types", None) or ()) if kind == CHUNKED}
    traits = {layer: AttentionTraits(config.attention_chunk_size) for layer in chunked}
    for module in model.modules():
        if (temperature := _temperature(module)) is not None:
            layer: int = module.layer_idx  # type: ignore[assignment]
            traits[layer] = AttentionTraits(config.attention_chunk_size if layer in chunked else None, temperature)
    return traits


def last_plain_start(model: nn.Module, start: int) -> int:
    """Last position up to `start` where a text's own forward, without a context, is that of a text from there on.

    transformers counts chunks, steps of scales and rounded biases from the text's first token.
    """
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    if getattr(config, "attn_temperature_tuning", False) or getattr(config, "alibi", False):
        start = 0
    if CHUNKED in (getattr(config, "layer_types", None) or ()):
        start -= start % config.attention_chunk_size
    return start


def _temperature(module: Any) -> tuple[float, float] | None:
    """Step and strength of a module's scales by position."""
    if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
        setattr(module, _TEMPERATURE, (float(module.floor_scale), float(module.attn_scale)))
        module.attn_temperature_tuning = False
    found: tuple[float, float] | None = getattr(module, _TEMPERATURE, None)
    return found
