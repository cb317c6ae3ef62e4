"""The oracle from elsewhere: transformers' own greedy generation. Only here, and only when used, torch is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coppice.tokenizer import fingerprint, load_tokenizer_json


class ReferenceModel:
    """A checkpoint in single precision on the CPU."""

    def __init__(self, directory: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.tokenizer_fingerprint = fingerprint(load_tokenizer_json(directory))
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, use_safetensors=True)
        self._model.generation_config.eos_token_id = None

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def greedy(self, prompt: Sequence[int], count: int, repetition_penalty: float = 1.0) -> list[int]:
        """The `count` tokens after a prompt, whatever ends the sequence."""
        import torch

        ids = torch.tensor([list(prompt)])
        rows = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            repetition_penalty=repetition_penalty,
            pad_token_id=0,
        )
        tokens: list[int] = rows[0, ids.shape[1] :].tolist()
        return tokens
