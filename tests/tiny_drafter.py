"""A tiny random drafter's checkpoint, for tests that serve it."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models

from tests.eight_bits import round_to_8_bits
from tests.tiny_checkpoint import ONE_LAYER, tiny_llama


def write_tiny_drafter(directory: Path, *, vocab_size: int, max_context_tokens: int) -> None:
    """A Llama of one layer, whose tokens are words."""
    model = tiny_llama(vocab_size=vocab_size, max_context_tokens=max_context_tokens, initializer_range=0.5, **ONE_LAYER)
    # However a token was read, alone or with others, its row is then the same.
    round_to_8_bits(model).save_pretrained(directory)
    words = {f"w{index}": index for index in range(vocab_size)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    (directory / "drafter.json").write_text('{"sigmas": {"0": 0.7}, "acceptance_by_rank": [0.5, 0.25]}')
