"""A tiny Llama as a checkpoint directory, tokenizer and all, for tests that start services on it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def write_tiny_llama(directory: Path, *, vocab_size: int, max_context_tokens: int) -> None:
    """Random weights, wide enough to keep logits well apart; each token is one character, and token 2 is EOS."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_context_tokens,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({chr(33 + index): index for index in range(vocab_size)}, unk_token="!"))
    words.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
