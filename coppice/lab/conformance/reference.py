"""The oracle from elsewhere: transformers' own greedy generation and log-probabilities.

Only here, and only when it is used, torch is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from coppice.checkpoints.quantization import INT8, quantize_linears
from coppice.core.tokenizer import fingerprint, load_tokenizer_json

LogProbs: TypeAlias = npt.NDArray[np.float64]


class ReferenceModel:
    """A checkpoint on the CPU, in the `dtype` and `quantization` that `GetModelInfo` names."""

    def __init__(self, directory: Path, dtype: str = "float32", quantization: str = "none") -> None:
        import torch
        from transformers import AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.tokenizer_fingerprint = fingerprint(load_tokenizer_json(directory))
        self._tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        self._model: Any = _loaded(directory, getattr(torch, dtype))
        if quantization == INT8:
            # As the verifier does it: of the checkpoint's own numbers. Rounded ones have other scales.
            exact = _loaded(directory, torch.float32)
            quantize_linears(exact)
            with torch.no_grad():
                for own, weights in zip(self._model.parameters(), exact.parameters(), strict=True):
                    own.copy_(weights)
        self.dtype = dtype
        self._model.generation_config.eos_token_id = None

    def log_probs(self, prompt: Sequence[int], tokens: Sequence[int]) -> LogProbs:
        """Log-probabilities [tokens, vocab] at the places of tokens after a prompt."""
        import torch

        ids = torch.tensor([[*prompt, *tokens]])
        with torch.inference_mode():
            logits = self._model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        rows: LogProbs = torch.log_softmax(logits.double(), dim=-1).numpy()
        return rows

    def encode(self, text: str) -> list[int]:
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


def _loaded(directory: Path, dtype: Any) -> Any:
    """The checkpoint's model in a dtype of torch."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, use_safetensors=True, trust_remote_code=False)
