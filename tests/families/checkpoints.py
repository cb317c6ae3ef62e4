"""Random checkpoints of a few hundred KB, one per family of models, with a tokenizer of one character per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.fuzz.exactness import EVENTS, FuzzPlan
from tests.tiny_checkpoint import write_tokenizer
from tests.unit.verifier_svc.adapters import ADAPTED, RECURRENT, random_adapter
from tests.unit.verifier_svc.early_heads import random_head
from verifier_svc.extras.pruning.head import save_head
from verifier_svc.extras.redraft.adapter import save_adapter
from verifier_svc.layers.kinds import layer_kinds
from verifier_svc.model.precision import DtypeName
from verifier_svc.model.target_model import TargetInfo, TargetModel

VOCAB, CONTEXT = 97, 420
HIDDEN = 32
_HEADS, _KV_HEADS, _FEED_FORWARD = 4, 2, 48
# Wide enough to keep logits well apart.
_RANGE = 0.3


@dataclass(frozen=True)
class Family:
    """Models of one class of `transformers`; `settings` are those of its configuration beside the usual sizes."""

    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    # Names of the usual sizes that this configuration does not have.
    without: tuple[str, ...] = ()
    # Rounding of transformers' own computation: gap of two logits below which it may choose another token.
    near_tie_gap: float = 1e-4

    def write(self, directory: Path, seed: int = 0) -> None:
        """Write a checkpoint with random weights."""
        _build(self, seed).save_pretrained(directory)
        write_tokenizer(directory, VOCAB)


def _build(family: Family, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model_class: Any = getattr(transformers, family.model)
    sizes = {
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "hidden_size": HIDDEN,
        "intermediate_size": _FEED_FORWARD,
        "num_hidden_layers": 2,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "initializer_range": _RANGE,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    settings = {name: value for name, value in sizes.items() if name not in family.without} | dict(family.settings)
    model: PreTrainedModel = model_class(model_class.config_class(**settings)).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        # Weights that start at a constant (norms, biases, steps) are made to matter.
        if parameter.dim() == 1 or parameter.std() == 0:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


# Names that some configurations have others for.
_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    "max_position_embeddings",
)
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_expand": 2}
_WITHOUT_ATTENTION = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
# Prompts in chunks, whose closed form rounds otherwise than token by token.
_CHUNKED = 2e-3
# In bfloat16 transformers rounds after each step, which changes what routers choose: its tokens are counted only.
_ROUNDED = float("inf")
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "mixtral": Family("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": Family("Qwen2MoeForCausalLM", {**_EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3-moe": Family("Qwen3MoeForCausalLM", {**_EXPERTS, "head_dim": 8}),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek-v3": Family(
        "DeepseekV3ForCausalLM",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "olmoe": Family("OlmoeForCausalLM", {"num_experts": 8, "num_experts_per_tok": 2}),
    "granite-moe": Family("GraniteMoeForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "lfm2": Family(
        "Lfm2ForCausalLM",
        {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3},
    ),
    "qwen3-next": Family(
        "Qwen3NextForCausalLM",
        {
            **_EXPERTS,
            **_DELTA,
            "shared_expert_intermediate_size": 40,
        },
        near_tie_gap=_CHUNKED,
    ),
    "qwen3.5": Family(
        "Qwen3_5ForCausalLM",
        {
            **_DELTA,
        },
        near_tie_gap=_CHUNKED,
    ),
    "lfm2-moe": Family(
        "Lfm2MoeForCausalLM",
        {
            **_EXPERTS,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 3,
            "num_dense_layers": 1,
        },
    ),
    "qwen3.5-moe": Family(
        "Qwen3_5MoeForCausalLM",
        {
            **_EXPERTS,
            **_DELTA,
            "shared_expert_intermediate_size": 40,
        },
        near_tie_gap=_CHUNKED,
    ),
    "granite-4": Family(
        "GraniteMoeHybridForCausalLM",
        {
            **_MAMBA,
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "position_embedding_type": "nope",
        },
        near_tie_gap=_CHUNKED,
    ),
    "bamba": Family(
        "BambaForCausalLM", {**_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]}, near_tie_gap=_CHUNKED
    ),
    "nemotron-h": Family(
        "NemotronHForCausalLM",
        {
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "head_dim": 8,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        },
        near_tie_gap=_CHUNKED,
    ),
    "falcon-h1": Family(
        "FalconH1ForCausalLM",
        {**_MAMBA, "mamba_d_ssm": 64, "head_dim": 8, "mamba_rms_norm": False},
        near_tie_gap=_CHUNKED,
    ),
    "mamba-2": Family(
        "Mamba2ForCausalLM",
        {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2},
        without=_WITHOUT_ATTENTION,
        near_tie_gap=_CHUNKED,
    ),
    "jamba": Family(
        "JambaForCausalLM",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": True,
        },
    ),
    "falcon-mamba": Family(
        "FalconMambaForCausalLM", {"state_size": 8, "time_step_rank": 4}, without=_WITHOUT_ATTENTION
    ),
    "mamba": Family("MambaForCausalLM", {"state_size": 8, "time_step_rank": 4}, without=_WITHOUT_ATTENTION),
    "kimi-linear": Family(
        "KimiLinearForCausalLM",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
        near_tie_gap=_CHUNKED,
    ),
    "bloom": Family(
        "BloomForCausalLM",
        {"n_layer": 2, "n_head": _HEADS},
        without=("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    ),
    "mpt": Family(
        "MptForCausalLM",
        {"d_model": HIDDEN, "n_layers": 2, "n_heads": _HEADS, "expansion_ratio": 2, "max_seq_len": CONTEXT},
        without=_SIZES,
    ),
    "falcon": Family(
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "num_kv_heads": _KV_HEADS, "ffn_hidden_size": _FEED_FORWARD},
        without=("num_key_value_heads", "intermediate_size"),
    ),
    "falcon-alibi": Family(
        "FalconForCausalLM",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "ffn_hidden_size": _FEED_FORWARD},
        without=("num_key_value_heads", "intermediate_size"),
    ),
    "llama-4": Family(
        "Llama4ForCausalLM",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 32,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "floor_scale": 16,
            "interleave_moe_layer_step": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "qwen-3": Family("Qwen3ForCausalLM", {"head_dim": 8}),
    "mistral": Family("MistralForCausalLM", {"sliding_window": 32}),
    "gemma-2": Family("Gemma2ForCausalLM", {"head_dim": 8, "sliding_window": 32, "query_pre_attn_scalar": 8}),
    "gemma-3": Family("Gemma3ForCausalLM", {"head_dim": 8, "sliding_window": 32, "query_pre_attn_scalar": 8}),
    "phi-3": Family("Phi3ForCausalLM"),
    "gpt-2": Family(
        "GPT2LMHeadModel",
        {"n_embd": HIDDEN, "n_layer": 2, "n_head": _HEADS, "n_positions": CONTEXT},
        without=_SIZES,
    ),
}

# Families that have every kind of recurrent layer, with and without attention and experts.
EACH_RECURRENCE = ("qwen3.5", "qwen3-next", "kimi-linear", "granite-4", "mamba", "lfm2")


def write_additions(model: Path, out: Path) -> tuple[Path, Path]:
    """Write a random early head and a random adapter for a family's checkpoint; returns their directories."""
    head, adapter = out / "head", out / "adapter"
    save_head(random_head(HIDDEN), head)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    save_adapter(random_adapter(loaded, num_masks=3, scale=0.2, names=ADAPTED + RECURRENT), adapter)
    return head, adapter


def plan_for(
    family: Family,
    directory: Path,
    tokens: int,
    changes: int,
    cases: int = 9,
    seed: int = 0,
    dtype: DtypeName = "float32",
) -> FuzzPlan:
    """What is tried with a family's checkpoint. An output need not hold a text of its own to be a stop string."""
    events = tuple(event for event in EVENTS if event != "ended by a stop string")
    gap = family.near_tie_gap if dtype == "float32" else _ROUNDED
    return FuzzPlan(directory, tokens, changes, cases, seed, 1, gap, events, dtype)


def row_of(name: str, family: Family, target: TargetModel, info: TargetInfo) -> str:
    """Row of the table of families in the documents: a loaded checkpoint's layers and exactness."""
    kinds = ", ".join(f"{number} {kind}" for kind, number in layer_kinds(target.model).items())
    return f"| {name} | `{family.model}` | {kinds} | {'strict' if info.exact else 'fast'} |\n"
