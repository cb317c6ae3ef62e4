"""Tiny random Llamas, and one as a checkpoint directory, tokenizer and all, for tests that start services on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# For drafters, and where a model is trained.
ONE_LAYER: dict[str, int] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def tiny_llama(*, vocab_size: int, max_context_tokens: int, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Random weights, wide enough to keep logits well apart; `changes` are those of its configuration."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        max_position_embeddings=max_context_tokens,
        **{
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "initializer_range": 0.3,
            "bos_token_id": None,
            "eos_token_id": 2,
            **changes,
        },
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


def write_tiny_llama(directory: Path, *, vocab_size: int, max_context_tokens: int, **changes: Any) -> None:
    """A tiny Llama whose tokens are one character each, token 2 being EOS; `changes` as in `tiny_llama`."""
    tiny_llama(vocab_size=vocab_size, max_context_tokens=max_context_tokens, **changes).save_pretrained(directory)
    write_tokenizer(directory, vocab_size)


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A tokenizer of one character per token."""
    words = Tokenizer(models.WordLevel({chr(33 + index): index for index in range(vocab_size)}, unk_token="!"))
    words.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)


def write_names_of_a_checkpoint(directory: Path) -> None:
    """A directory with the files that the command line looks for in a checkpoint, and no model in them."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"")
