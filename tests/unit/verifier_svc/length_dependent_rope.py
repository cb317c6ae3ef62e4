"""Tiny random models whose rotary factors depend on the text's length, and what they say by plain forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
)

from coppice.core.sampling import SamplingParams
from tests.tiny_checkpoint import tiny_llama
from tests.unit.verifier_svc.oracles import plain_logits
from tests.unit.verifier_svc.tiny_engine import VOCAB, tiny_info
from verifier_svc.kernels.cpu.attention import CompiledKernel
from verifier_svc.kernels.cpu.packed_layers import pack_linears
from verifier_svc.model.target_model import TargetInfo, TargetModel
from verifier_svc.verify.token_choice import TokenChooser

# Texts of more than BOUNDARY tokens have long factors. More than a block of the cache, so that prefixes are shared on
# both sides.
BOUNDARY, CONTEXT = 100, 256
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def long_rope(head_dim: int, **more: float) -> dict[str, Any]:
    """Factors that are far apart, so that the wrong ones show."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": BOUNDARY,
        "short_factor": [1.0 + 0.02 * index for index in range(head_dim // 2)],
        "long_factor": [1.5 + index for index in range(head_dim // 2)],
        **more,
    }


def _phi3() -> PreTrainedModel:
    config = Phi3Config(**_SHAPE, original_max_position_embeddings=BOUNDARY, rope_parameters=long_rope(8))
    return Phi3ForCausalLM(config)


def _phimoe() -> PreTrainedModel:
    rope = long_rope(8, short_mscale=1.1, long_mscale=1.4)
    config = PhimoeConfig(
        **_SHAPE,
        original_max_position_embeddings=BOUNDARY,
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
        rope_parameters=rope,
    )
    return PhimoeForCausalLM(config)


def _gemma3() -> PreTrainedModel:
    config = Gemma3TextConfig(
        **_SHAPE,
        head_dim=16,
        # Sharp enough for positions to decide on tokens.
        query_pre_attn_scalar=4,
        sliding_window=24,
        # Else each token is followed by itself.
        tie_word_embeddings=False,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": long_rope(16),
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )
    return Gemma3ForCausalLM(config)


def _llama() -> PreTrainedModel:
    return tiny_llama(vocab_size=VOCAB, max_context_tokens=CONTEXT, rope_parameters=long_rope(8))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "phi3": _phi3,
    "llama": _llama,
    "gemma3": _gemma3,
    "phimoe": _phimoe,
}


def new_model(family: str) -> PreTrainedModel:
    """A model with rope of type `longrope`, always the same."""
    torch.manual_seed(0)
    return FAMILIES[family]().eval()


def dynamic_llama(trained_length: int) -> PreTrainedModel:
    """A Llama with rope of type `dynamic`."""
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    return tiny_llama(vocab_size=VOCAB, max_context_tokens=trained_length, rope_parameters=rope)


def new_target(model: PreTrainedModel, num_blocks: int = 60) -> TargetModel:
    """A target as it is loaded on a CPU."""
    pack_linears(model)
    return TargetModel(model, exact=True, num_blocks=num_blocks, kernel=CompiledKernel())


def info_of(target: TargetModel, context: int = CONTEXT) -> TargetInfo:
    """What is said of such a target."""
    return replace(tiny_info(), hidden_size=32, max_context_tokens=context, rope_boundary=target.rope_boundary)


def plain_output(
    model: PreTrainedModel, prompt: Sequence[int], count: int, sampling: SamplingParams | None = None
) -> list[int]:
    """Tokens by one plain forward over the whole text for each, without a cache, EOS or not."""
    chooser = TokenChooser(sampling or SamplingParams(), VOCAB, prompt=prompt)
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(chooser.choose(plain_logits(model, tokens).numpy(), len(tokens)))
        chooser.push(tokens[-1])
    return tokens[len(prompt) :]
