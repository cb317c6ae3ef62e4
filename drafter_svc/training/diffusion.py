"""`coppice train diffusion`: masked diffusion over blocks, then streak distillation from the target.

The first part of the run learns to fill in masks among true tokens at any rate, which is what denoising in several
steps needs. The second part learns what one step from nothing but masks is worth to the verifier, and keeps the first
up on a share of the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from coppice.training.block_layout import random_layout
from coppice.training.block_losses import diffusion_loss, position_weights, streak_loss, token_terms
from coppice.training.teacher import TaughtRows, distillation_terms
from drafter_svc.training.block_run import BlockRecipe, train_block_drafter

KIND = "diffusion"
# One layer more than the small LM: it costs once per block, and masks must look farther than tokens.
EXTRA_LAYERS = 1
# Fraction of steps on the diffusion objective only, and fraction of blocks on it in later steps.
DIFFUSION_SHARE = 0.4
KEPT_SHARE = 0.25
STORY = """
The row at position t predicts the token at t + 1. The vocabulary ends with the mask. The rows of a block see the
committed tokens and each other; the last token of a block has no row. Acceptance was measured with one denoising step.
"""


def diffusion_recipe(steps: int, samples: int, corpus_rows: int, seed: int, *, layers_alone: bool) -> BlockRecipe:
    """The recipe of the kind."""
    return BlockRecipe(
        KIND,
        steps,
        sample_rows=samples,
        corpus_rows=corpus_rows,
        extra_layers=EXTRA_LAYERS,
        diffusion_share=DIFFUSION_SHARE,
        layers_alone=layers_alone,
        seed=seed,
    )


def train_diffusion(roots: Sequence[Path], target_dir: Path, start_dir: Path, out: Path, recipe: BlockRecipe) -> None:
    """Train, measure, and write the checkpoint with its card and `drafter.json`.

    Raises IncompatibleError if the model to start from is not the target's, or the state there is another run's.
    """
    train_block_drafter(roots, target_dir, start_dir, out, recipe, DiffusionObjective(recipe), STORY)


@dataclass(frozen=True, slots=True)
class DiffusionObjective:
    """The diffusion objective on some blocks and streak distillation on the others."""

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
            streaks, before = ~diffused, layout.predicted[~diffused] - 1
            terms = distillation_terms(
                logits[:, streaks], batch.top_ids[:, before], batch.top_log_probs[:, before], recipe.total_variation
            )
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
