"""The beginning of every recipe: the models that it is given, its text and its state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from coppice.core.errors import IncompatibleError
from coppice.training.corpus import corpus_digest, read_corpus
from coppice.training.loop import training_dtype
from coppice.training.state import open_state, weights_digest
from coppice.training.token_store import TokenStore


def load_target(directory: Path, dtype: torch.dtype | None = None) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """The target's tokenizer and the target, in the precision of training unless another is named.

    Raises IncompatibleError if one cannot be read.
    """
    with reading_from(directory):
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        target = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype or training_dtype(), use_safetensors=True, trust_remote_code=False
        ).eval()
    return tokenizer, target


@contextlib.contextmanager
def reading_from(directory: Path) -> Iterator[None]:
    """Turn transformers' errors for an unusable directory into an IncompatibleError that names it."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        raise IncompatibleError(f"no model can be read from {directory}: {error}") from error


def open_run(
    roots: Sequence[Path], tokenizer: PreTrainedTokenizerBase, out: Path, recipe: Any, /, **made_from: nn.Module | str
) -> tuple[TokenStore, Path]:
    """The corpus in tokens, and the state directory of the run that writes `out`.

    `made_from` are the models, or digests, that decide the result with recipe and corpus. Raises IncompatibleError if
    the state there is another run's, or the corpus cannot be split.
    """
    files = read_corpus(roots)
    digests = {name: one if isinstance(one, str) else weights_digest(one) for name, one in made_from.items()}
    state_dir = open_state(out, recipe, {**digests, "corpus": corpus_digest(files)})
    return TokenStore.build(files, tokenizer, state_dir), state_dir
