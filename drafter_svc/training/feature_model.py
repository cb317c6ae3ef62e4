"""A token-only block drafter, frozen, and what the target's hidden states add to its inputs, which learns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from drafter_svc.drafters.feature_inputs import FeatureInputs
from training.transition import TrainedTransition, even_rows


class FeatureModel(nn.Module):
    """Adds as `FeatureInputs` does, and begins as nothing. Text comes first in a row, then groups of masks behind it."""

    def __init__(
        self,
        trunk: LlamaForCausalLM,
        transition: TrainedTransition | None,
        num_masks: int,
        width: int,
        rank: int,
        seed: int,
    ) -> None:
        """Features have `width` numbers; what masks get has a `rank`."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        hidden = trunk.config.hidden_size
        self.trunk = trunk.requires_grad_(False)
        self.transition = None if transition is None else transition.requires_grad_(False)
        self.token = nn.Parameter(torch.zeros(hidden, width))
        self.down = nn.Parameter(torch.randn(rank, width, generator=generator) * width**-0.5)
        self.up = nn.Parameter(torch.zeros(num_masks, hidden, rank))

    def forward(self, input_ids: Tensor, features: Tensor, anchors: Tensor, **others: Any) -> Any:
        """The trunk's output.

        Args:
            input_ids: text and masks [R, N].
            features: the text's own [R, L, width]; zeros where there are none.
            anchors: behind which tokens the groups of masks stand [G].
            others: what the trunk takes besides.
        """
        rows = even_rows(features)
        latest = F.silu(F.linear(rows[:, anchors], self.down))
        masks = torch.einsum("rgk,phk->rgph", latest, self.up.to(latest.dtype))
        added = torch.cat([F.linear(rows, self.token), masks.flatten(1, 2)], 1)
        embed: Any = self.trunk.get_input_embeddings()
        return self.trunk(inputs_embeds=embed(input_ids) + added, **others)

    def inputs(self) -> FeatureInputs:
        """What was learned."""
        token, down, up = (matrix.detach().float().cpu().numpy() for matrix in (self.token, self.down, self.up))
        return FeatureInputs(token, down, up)
