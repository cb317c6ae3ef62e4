"""What the token before says of the next one: what masks cannot know, since nobody had drawn it yet when they ran."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from verifier_svc.space_adapter import Transition


class TrainedTransition(nn.Module):
    """A score for each pair of neighbours, of low rank: from the target's own embeddings of both.

    Begins as nothing. Both sides are tables once it is trained, so that a pair costs a product of `rank` numbers.
    """

    def __init__(self, target: PreTrainedModel, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        embed: Any = target.get_input_embeddings()
        output: Any = target.get_output_embeddings()
        # In a tuple, so that the target's parameters are none of ours.
        self._tables = (_even(embed.weight), _even(output.weight))
        before, behind = (table.shape[1] for table in self._tables)
        self.before = nn.Parameter(torch.randn(rank, before, generator=generator) * before**-0.5)
        self.behind = nn.Parameter(torch.zeros(rank, behind))

    def forward(self, token_ids: Tensor) -> Tensor:
        """What is added to the logits [..., V] of the tokens behind `token_ids` [...]."""
        before, behind = self._tables
        own = F.silu(F.linear(before[token_ids], self.before))
        return F.linear(own, F.linear(behind, self.behind))

    @torch.no_grad()
    def tables(self) -> Transition:
        """Both sides, in bfloat16."""
        before, behind = self._tables
        own = F.silu(F.linear(before, self.before))
        return Transition(own.bfloat16(), F.linear(behind, self.behind).bfloat16())


def _even(table: Tensor) -> Tensor:
    """Rows of the same size, an embedding's numbers being about 1 each."""
    rows = table.detach().float()
    return rows / rows.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-6)
