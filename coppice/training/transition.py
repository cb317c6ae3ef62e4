"""A trained transition: the token before says something of the next one, which masks cannot know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel


class TrainedTransition(nn.Module):
    """A score for each pair of neighbours, of low rank: from a model's own embeddings of both.

    Begins as nothing. Both sides are tables once it is trained, so that a pair costs a product of `rank` numbers.
    """

    def __init__(self, model: PreTrainedModel, rank: int, generator: torch.Generator, num_tokens: int = 0) -> None:
        """Knows the first `num_tokens` of the model's vocabulary; 0 for all."""
        super().__init__()
        embed: Any = model.get_input_embeddings()
        output: Any = model.get_output_embeddings()
        # In a tuple, so that the model's parameters are none of ours; they may go on learning.
        self._layers = (embed, output)
        self._num_tokens = num_tokens or len(embed.weight)
        before, behind = (layer.weight.shape[1] for layer in self._layers)
        self.before = nn.Parameter(torch.randn(rank, before, generator=generator) * before**-0.5)
        self.behind = nn.Parameter(torch.zeros(rank, behind))

    def forward(self, token_ids: Tensor) -> Tensor:
        """What is added to the logits [..., V] of the tokens after `token_ids` [...]."""
        before, behind = (layer.weight[: self._num_tokens] for layer in self._layers)
        own = F.silu(F.linear(even_rows(before[token_ids]), self.before))
        return F.linear(own, F.linear(even_rows(behind), self.behind))


def even_rows(table: Tensor) -> Tensor:
    """Rows of the same size, an embedding's numbers being about 1 each; they are not to learn by this."""
    rows = table.detach().float()
    return rows / rows.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-6)
