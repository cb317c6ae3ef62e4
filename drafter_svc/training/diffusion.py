"""`coppice train diffusion`: masked diffusion over blocks, then streak distillation from the target.

The first part of the run learns to fill in masks among true tokens at any rate, which is what denoising in several
steps needs. The second part learns what one step from nothing but masks is worth to the verifier, and keeps the first
up on a share of the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from coppice.training.block_layout import diffusion_loss, position_weights, random_layout, streak_loss, token_terms
from coppice.training.teacher import TaughtRows
from drafter_svc.training.block_run import BlockRecipe

KIND = "diffusion"
# Fraction of blocks on the diffusion objective in the steps after those on it only.
KEPT_SHARE = 0.25
STORY = """
The row at position t predicts the token at t + 1. The vocabulary ends with the mask. The rows of a block see the
committed tokens and each other; the last token of a block has no row. Acceptance was measured with one denoising step.
"""


@dataclass(frozen=True, slots=True)
class DiffusionObjective:
    """The diffusion objective on some blocks and streak distillation on the others."""

    # One layer more than the small LM: it costs once per block, and masks must look farther than tokens.
    usual: ClassVar[BlockRecipe] = BlockRecipe(KIND, extra_layers=1, diffusion_share=0.4)
    story: ClassVar[str] = STORY
    sees_all: ClassVar[bool] = True
    num_masks: ClassVar[int] = 1
    recipe: BlockRecipe

    def diffused_share(self, step: int) -> float:
        """Fraction of a step's blocks that are masked at random."""
        return 1.0 if step < self.recipe.diffusion_share * self.recipe.steps else KEPT_SHARE

    def loss(self, model: nn.Module, batch: TaughtRows, masks: Tensor, step: int) -> Tensor:
        """Loss of blocks at random positions."""
        recipe, num_rows = self.recipe, self.recipe.block - 1
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        length = batch.token_ids.shape[1]
        layout = random_layout(length, recipe.groups, num_rows, self.sees_all, generator)
        # By no order of places: the blocks in front see less text.
        count = len(layout.anchors)
        diffused = torch.randperm(count, generator=generator) < round(self.diffused_share(step) * count)
        rates = mask_rates(diffused, len(batch), recipe.block, generator)
        hidden = torch.rand(rates.shape, generator=generator) < rates
        token_ids = batch.token_ids[:, layout.predicted]
        groups = torch.where(hidden[..., :-1], masks[0], token_ids[..., :-1])
        logits = layout.run(model, batch.token_ids, groups)[..., : masks[0]]
        token_losses = token_terms(logits, token_ids)
        loss = token_losses.new_zeros(())
        if diffused.any():
            parts = [part[:, diffused] for part in (token_losses, hidden, rates)]
            loss = loss + float(diffused.float().mean()) * diffusion_loss(parts[0], parts[1], parts[2])
        if not diffused.all():
            streaks = ~diffused
            terms = batch.terms(logits[:, streaks], layout.predicted[streaks], recipe.total_variation)
            weights = position_weights(recipe.block, recipe.position_decay)
            loss = loss + streak_loss(terms, token_losses[:, streaks], weights)
        return loss


def mask_rates(diffused: Tensor, rows: int, block: int, generator: torch.Generator) -> Tensor:
    """The probability at which each token is masked [rows, groups, block].

    Spread evenly over 0 to 1 among the blocks of a row that are diffused [groups], and 1 for those of the others; the
    last token of a block has no row of its own to show it, and is always masked.
    """
    rates = torch.ones(rows, len(diffused), block)
    count = int(diffused.sum())
    spread = (torch.arange(count) + torch.rand(rows, count, generator=generator)) / max(count, 1)
    rates[:, diffused] = spread[..., None].expand(-1, -1, block)
    rates[..., -1] = 1
    return rates
