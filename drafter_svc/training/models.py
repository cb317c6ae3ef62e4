"""The models that recipes of drafters begin with: the target, its tokenizer, and the small LM to start from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from coppice.core.errors import IncompatibleError
from coppice.training.run import load_target, reading_from


class TrainingModels(NamedTuple):
    """`target` in the precision of training, `start` in float32, both of one vocabulary."""

    tokenizer: PreTrainedTokenizerBase
    target: PreTrainedModel
    start: LlamaForCausalLM


def load_models(target_dir: Path, start_dir: Path) -> TrainingModels:
    """Load all of them.

    Raises IncompatibleError if one cannot be read, or the model to start from is no Llama or not of the target's
    vocabulary.
    """
    tokenizer, target = load_target(target_dir)
    start = load_start(start_dir)
    if start.config.vocab_size != target.config.vocab_size:
        raise IncompatibleError(
            f"{start_dir} has {start.config.vocab_size} tokens and {target_dir} {target.config.vocab_size}"
        )
    return TrainingModels(tokenizer, target, start)


def load_start(directory: Path) -> LlamaForCausalLM:
    """The Llama to start from, in float32. Raises IncompatibleError if it is no Llama, or cannot be read."""
    with reading_from(directory):
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )
    if not isinstance(model, LlamaForCausalLM):
        raise IncompatibleError(f"{directory} is a {type(model).__name__}; drafters start from a Llama")
    return model
