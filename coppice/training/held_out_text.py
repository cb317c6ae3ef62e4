"""The target's continuations of held-out prompts, on which drafts are measured."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coppice.training.acceptance_report import TEMPERATURES
from coppice.training.target_samples import SampleShape, continue_prompts
from coppice.training.token_store import TokenStore

# Prompts at each temperature.
EVALUATION_ROWS = 48


def held_out_text(target: PreTrainedModel, store: TokenStore, shape: SampleShape, seed: int) -> dict[float, Tensor]:
    """Per temperature, held-out prompts with the target's continuations [rows, tokens]."""
    rows = {}
    target = target.float()
    (windows,) = store.held_out_batches(EVALUATION_ROWS, EVALUATION_ROWS, shape.prompt_tokens)
    for number, temperature in enumerate(TEMPERATURES):
        torch.manual_seed(seed + number)
        continued = continue_prompts(target, windows, shape.new_tokens, temperature)
        rows[temperature] = torch.from_numpy(continued.astype("int64"))
    return rows
