"""`coppice train semi-ar`: the small LM learns masks after the last committed token, one embedding for each place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from coppice.training.block_layout import position_weights, random_layout, weighted
from coppice.training.teacher import TaughtRows
from drafter_svc.training.block_model import block_logits
from drafter_svc.training.block_run import BlockRecipe

KIND = "semi-ar"
STORY = """
The row at position t predicts the token at t + 1. The vocabulary ends with one mask for each place after the last
committed token; a mask sees the committed tokens and the masks before it. What it says of a token also depends on the
token before, which the draft has by then: low-rank `transition` matrices act on the embeddings of both.
"""


@dataclass(frozen=True, slots=True)
class SemiArObjective:
    """The target's own distribution at every token of a block, those nearer to its beginning weighing more.

    The target knows the tokens in between and the drafter does not: on average over the target's text, what its masks
    are asked for are the target's marginals, given the last of these tokens where there is a transition.
    """

    usual: ClassVar[BlockRecipe] = BlockRecipe(KIND, transition_rank=64)
    story: ClassVar[str] = STORY
    sees_all: ClassVar[bool] = False
    recipe: BlockRecipe

    @property
    def num_masks(self) -> int:
        """One for each token of a block but the first, which the last committed token predicts."""
        return self.recipe.block - 1

    def loss(self, model: nn.Module, batch: TaughtRows, masks: Tensor, step: int) -> Tensor:
        """The weighted distillation loss of blocks at random places."""
        recipe = self.recipe
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        length = batch.token_ids.shape[1]
        layout = random_layout(length, recipe.groups, len(masks), self.sees_all, generator)
        groups = masks.expand(len(batch), len(layout.anchors), -1)
        logits = block_logits(model, layout, batch.token_ids, groups)[..., : masks[0]]
        terms = batch.terms(logits, layout.predicted, recipe.total_variation)
        return weighted(terms, position_weights(recipe.block, recipe.position_decay))
