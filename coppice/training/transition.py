"""Trained transition: the previous token's contribution to the next token's scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel


class TrainedTransition(nn.Module):
    """Low-rank scores of pairs of neighbouring tokens, from a model's embeddings of both.

    Initially zero. After training both sides are tables, so a pair costs a product of `rank` numbers.
    """

    def __init__(self, model: PreTrainedModel, rank: int, generator: torch.Generator, num_tokens: int = 0) -> None:
        """Covers the first `num_tokens` of the model's vocabulary; 0 for all."""
        super().__init__()
        embed: Any = model.get_input_embeddings()
        output: Any = model.get_output_embeddings()
        # In a tuple, so that the model's parameters are not registered here; they may be trained elsewhere.
        self._layers = (embed, output)
        self._num_tokens = num_tokens or len(embed.weight)
        before, behind = (layer.weight.shape[1] for layer in self._layers)
        self.before = nn.Parameter(torch.randn(rank, before, generator=generator) * before**-0.5)
        self.behind = nn.Parameter(torch.zeros(rank, behind))

    def forward(self, token_ids: Tensor) -> Tensor:
        """Additions to the logits [..., V] of the tokens after `token_ids` [...]."""
        before, behind = (layer.weight[: self._num_tokens] for layer in self._layers)
        own = F.silu(F.linear(even_rows(before[token_ids]), self.before))
        return F.linear(own, F.linear(even_rows(behind), self.behind))


def even_rows(table: Tensor) -> Tensor:
    """Rows normalised to RMS 1, without gradient."""
    rows = table.detach().float()
    return rows / rows.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-6)
