"""The target's last hidden states: what its output layer is given at every token of a text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


@contextmanager
def noted_states(target: PreTrainedModel) -> Iterator[list[Tensor]]:
    """While it is entered, every forward's states [rows, length, hidden] in bfloat16 are appended to the list."""
    seen: list[Tensor] = []
    layer: Any = target.get_output_embeddings()
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().bfloat16()))
    try:
        yield seen
    finally:
        handle.remove()


@torch.inference_mode()
def states_of(target: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """The states [rows, length, hidden] in bfloat16 of a text [rows, length]."""
    with noted_states(target) as seen:
        target(input_ids=token_ids, use_cache=False)
    return seen[0]


def committed_states(states: Tensor, prompt_tokens: int) -> Tensor:
    """For every token the state that it was drawn from [rows, length, hidden]; zeros in the prompt.

    The first token of a row, behind nothing, has none either.
    """
    drawn_from = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
    drawn_from[:, :prompt_tokens] = 0
    return drawn_from
