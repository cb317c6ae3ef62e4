"""A token-only block drafter, frozen, and heads on the target's hidden states that correct it, which learn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from drafter_svc.drafters.feature_heads import FloatArray
from training.transition import even_rows


class FeatureModel(nn.Module):
    """Adds as `FeatureHeads` does, and begins as nothing. A row is text, and behind it groups of masks."""

    def __init__(self, trunk: LlamaForCausalLM, num_places: int, feature_size: int, rank: int, seed: int) -> None:
        """Features have `feature_size` numbers, heads a `rank`."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        hidden = trunk.config.hidden_size
        self.trunk = trunk.requires_grad_(False)
        self.transition: nn.Module | None = getattr(trunk, "transition", None)
        self.of_feature = nn.Parameter(torch.randn(rank, feature_size, generator=generator) * feature_size**-0.5)
        self.of_token = nn.Parameter(torch.randn(rank, hidden, generator=generator) * hidden**-0.5)
        self.up = nn.Parameter(torch.zeros(num_places, hidden, rank))

    def forward(
        self, input_ids: Tensor, features: Tensor, anchors: Tensor, logits_to_keep: Tensor, **others: Any
    ) -> CausalLMOutput:
        """The trunk's logits, with what the heads add.

        Args:
            input_ids: text and masks [R, N].
            features: the text's own [R, L, width]; zeros where there are none.
            anchors: behind which tokens the groups of masks stand [G].
            logits_to_keep: rows with logits: the anchors', then those of the masks.
            others: what the trunk takes besides.
        """
        with torch.no_grad():
            hidden = self.trunk.model(input_ids=input_ids, **others).last_hidden_state[:, logits_to_keep]
        latest, embed = features[:, anchors], self.trunk.get_input_embeddings()
        own = F.linear(even_rows(latest), self.of_feature)
        own = own + F.linear(even_rows(embed(input_ids[:, anchors])), self.of_token)
        said = torch.einsum("rgk,phk->rgph", F.silu(own), self.up.to(own.dtype))
        said = said * (latest != 0).any(-1)[..., None, None]
        added = torch.cat([said[:, :, 0], said[:, :, 1:].flatten(1, 2)], 1)
        return CausalLMOutput(logits=self.trunk.lm_head(hidden + added))

    def matrices(self) -> dict[str, FloatArray]:
        """What was learned, by name."""
        learned = {"of_feature": self.of_feature, "of_token": self.of_token, "up": self.up}
        return {name: matrix.detach().float().cpu().numpy() for name, matrix in learned.items()}

    @property
    def num_learned(self) -> int:
        """Numbers that were learned."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
