"""Attention of modules that compute their own, with linear biases (ALiBi, arXiv 2108.12409; Bloom, MPT, Falcon)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

from coppice.core.errors import IncompatibleError
from verifier_svc.kernels.base import AttentionRule

# Layer, query, key and value [heads, N, dim], and rule, to [N, heads, dim].
Attend = Callable[[int, Tensor, Tensor, Tensor, AttentionRule], Tensor]


def install_alibi(model: nn.Module, attend: Attend) -> int:
    """Let a model's attention modules of a known kind use `attend`; returns their number.

    Raises:
        IncompatibleError: a module has settings that are not supported.
    """
    installed = 0
    for module in model.modules():
        kind = _KINDS.get(type(module).__name__)
        if kind is not None:
            module.forward = kind(module, attend)
            installed += 1
    return installed


def computes_alibi(model: nn.Module) -> bool:
    """Whether a model has attention modules that are replaced here."""
    return any(type(module).__name__ in _KINDS for module in model.modules())


def _bloom(module: Any, attend: Attend) -> Callable[..., tuple[Tensor, None]]:
    if module.pretraining_tp > 1 and module.slow_but_exact:
        raise IncompatibleError("BloomForCausalLM with slow_but_exact is not supported")
    slopes = _slopes(module)
    rule = AttentionRule(module.inv_norm_factor, slopes=slopes)

    def forward(hidden_states: Tensor, residual: Tensor, *_: object, **_named: object) -> tuple[Tensor, None]:
        query, key, value = (part[0] for part in module._reshape(module.query_key_value(hidden_states)))
        result = attend(module.layer_idx, query, key, value, rule)
        return residual + module.dense(result.flatten(1)[None]), None

    return forward


def _mpt(module: Any, attend: Attend) -> Callable[..., tuple[Tensor, None]]:
    slopes: Tensor | None = None

    def forward(hidden_states: Tensor, position_bias: Tensor, *_: object, **_named: object) -> tuple[Tensor, None]:
        nonlocal slopes
        if slopes is None:
            slopes = _mpt_slopes(module, position_bias)
        mixed = module.Wqkv(hidden_states)
        if module.clip_qkv:
            mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        query, key, value = (
            part[0].unflatten(-1, (module.n_heads, -1)).transpose(0, 1) for part in mixed.chunk(3, dim=2)
        )
        result = attend(module.layer_idx, query, key, value, AttentionRule(module.softmax_scale, slopes=slopes))
        return module.out_proj(result.flatten(1)[None]), None

    return forward


def _falcon(module: Any, attend: Attend) -> Callable[..., tuple[Tensor, None]]:
    # Slopes are rounded, and so are their products with positions.
    slopes = _slopes(module)
    rule = AttentionRule(module.inv_norm_factor, slopes=slopes, rounds_biases=True)
    without = AttentionRule(module.inv_norm_factor)

    def forward(
        hidden_states: Tensor,
        alibi: Tensor | None,
        *_: object,
        position_embeddings: tuple[Tensor, Tensor],
        **_named: object,
    ) -> tuple[Tensor, None]:
        parts = module._split_heads(module.query_key_value(hidden_states))
        query, key, value = (part.transpose(1, 2) for part in parts)
        if alibi is None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        result = attend(module.layer_idx, query[0], key[0], value[0], without if alibi is None else rule)
        return module.dense(result.flatten(1)[None]), None

    return forward


def _slopes(module: Any) -> Tensor:
    """Slopes [heads], by which the biases of positions 0 and 1 differ."""
    two = torch.ones(1, 2, device=module.query_key_value.weight.device)
    slopes: Tensor = build_alibi_tensor(two, module.num_heads, torch.float32)[:, 0, 1]
    return slopes


def _mpt_slopes(module: Any, position_bias: Tensor) -> Tensor:
    """Slopes [heads]: the differences of the model's own biases of two neighbouring keys."""
    return position_bias[:, 0, -1] - position_bias[:, 0, -2]


_KINDS: dict[str, Callable[[Any, Attend], Callable[..., tuple[Tensor, None]]]] = {
    "BloomAttention": _bloom,
    "MptAttention": _mpt,
    "FalconAttention": _falcon,
}
