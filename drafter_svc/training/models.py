"""The models that recipes of drafters begin with: the target, its tokenizer, and the small LM to start from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from coppice.errors import IncompatibleError
from training.precision import training_dtype


class Models(NamedTuple):
    """`target` in the precision of training, `start` in float32, both of one vocabulary."""

    tokenizer: PreTrainedTokenizerBase
    target: PreTrainedModel
    start: LlamaForCausalLM


def load_models(target_dir: Path, start_dir: Path) -> Models:
    """Load all of them.

    Raises:
        IncompatibleError: the model to start from is no Llama, or not of the target's vocabulary.
        OSError, ValueError: one cannot be read.
    """
    tokenizer, target = load_target(target_dir)
    start = load_start(start_dir)
    if start.config.vocab_size != target.config.vocab_size:
        raise IncompatibleError(
            f"{start_dir} has {start.config.vocab_size} tokens and {target_dir} {target.config.vocab_size}"
        )
    return Models(tokenizer, target, start)


def load_target(directory: Path) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """The target in the precision of training, and its tokenizer.

    Raises:
        OSError, ValueError: one cannot be read.
    """
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    target = AutoModelForCausalLM.from_pretrained(
        directory, dtype=training_dtype(), use_safetensors=True, trust_remote_code=False
    ).eval()
    return tokenizer, target


def load_start(directory: Path) -> LlamaForCausalLM:
    """The Llama to start from, in float32.

    Raises:
        IncompatibleError: it is no Llama.
        OSError, ValueError: it cannot be read.
    """
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    )
    if not isinstance(model, LlamaForCausalLM):
        raise IncompatibleError(f"{directory} is a {type(model).__name__}; drafters start from a Llama")
    return model
