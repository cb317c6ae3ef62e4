"""The corpus as two arrays of token ids, cached with the run's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from coppice.checkpoints.writing import whole_file
from coppice.core.errors import IncompatibleError
from coppice.training.corpus import HELD_OUT_ONE_IN, SourceFile

TokenArray = npt.NDArray[np.uint16]
MAX_VOCAB_SIZE = 2**16


@dataclass(frozen=True, slots=True)
class TokenStore:
    """Token ids of both splits, documents joined by the end-of-text token."""

    train: TokenArray
    held_out: TokenArray
    held_out_bytes: int

    @property
    def held_out_bytes_per_token(self) -> float:
        """Bytes of held-out text per token, to convert nats per token into bits per byte."""
        return self.held_out_bytes / len(self.held_out)

    @classmethod
    def build(cls, files: Sequence[SourceFile], tokenizer: PreTrainedTokenizerBase, cache: Path) -> Self:
        """Tokenize `files`, or load them from `cache`.

        Raises IncompatibleError if all files are of one split, or the vocabulary exceeds 16-bit ids.
        """
        path = cache / "tokens.npz"
        if not path.exists():
            _check(files, len(tokenizer))
            arrays: dict[str, TokenArray] = {}
            for split, held_out in (("train", False), ("held_out", True)):
                texts = [file.text for file in files if file.is_held_out == held_out]
                encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
                eos = tokenizer.eos_token_id
                arrays[split] = np.concatenate([np.array([*ids, eos], np.uint16) for ids in encoded])
            num_bytes = sum(len(file.text.encode()) for file in files if file.is_held_out)
            cache.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as file:
                np.savez(file, train=arrays["train"], held_out=arrays["held_out"], held_out_bytes=np.array(num_bytes))
        loaded = np.load(path)
        return cls(loaded["train"], loaded["held_out"], int(loaded["held_out_bytes"]))

    def training_batch(self, seed: int, step: int, rows: int, length: int) -> torch.Tensor:
        """Random windows [rows, length], as a function of (seed, step), so a resumed run continues correctly.

        Raises IncompatibleError if there is too little text for a row.
        """
        _check_room("training", self.train, length)
        generator = np.random.default_rng([seed, step])
        starts = generator.integers(0, len(self.train) - length, rows)
        return torch.from_numpy(np.stack([self.train[s : s + length] for s in starts]).astype(np.int64))

    def held_out_batches(self, windows: int, rows: int, length: int) -> list[torch.Tensor]:
        """Evenly spaced held-out windows, always the same, as batches [rows, length].

        Raises IncompatibleError if there is too little text for a row.
        """
        _check_room("held-out", self.held_out, length)
        starts = np.linspace(0, len(self.held_out) - length - 1, windows).astype(int)
        data = np.stack([self.held_out[s : s + length] for s in starts]).astype(np.int64)
        return list(torch.split(torch.from_numpy(data), rows))


def _check_room(split: str, tokens: TokenArray, length: int) -> None:
    if len(tokens) <= length:
        raise IncompatibleError(
            f"the corpus is too small: its {split} text has {len(tokens)} tokens, and a row is {length}"
        )


def _check(files: Sequence[SourceFile], vocab_size: int) -> None:
    if vocab_size > MAX_VOCAB_SIZE:
        raise IncompatibleError(f"the tokenizer has {vocab_size} tokens, and training takes at most {MAX_VOCAB_SIZE}")
    num_held_out = sum(file.is_held_out for file in files)
    if num_held_out in (0, len(files)):
        raise IncompatibleError(
            f"the corpus is too small: of {len(files)} files {num_held_out} are held out, by their names "
            f"(about one in {HELD_OUT_ONE_IN} is), and both kinds are needed"
        )
