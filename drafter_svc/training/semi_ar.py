"""`coppice train semi-ar`: the small LM learns masks after the last committed token, one embedding for each place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from coppice.training.block_layout import random_layout
from coppice.training.block_losses import position_weights, weighted
from coppice.training.teacher import TaughtRows, distillation_terms
from drafter_svc.training.block_model import block_logits
from drafter_svc.training.block_run import BlockRecipe, train_block_drafter

KIND = "semi-ar"
TRANSITION_RANK = 64
STORY = """
The row at position t predicts the token at t + 1. The vocabulary ends with one mask for each place behind the last
committed token; a mask sees the committed tokens and the masks before it. What it says of a token also depends on the
token before, which the draft has by then: low-rank `transition` matrices act on the embeddings of both.
"""


def semi_ar_recipe(steps: int, samples: int, corpus_rows: int, seed: int, *, layers_alone: bool) -> BlockRecipe:
    """The recipe of the kind."""
    return BlockRecipe(
        KIND,
        steps,
        sample_rows=samples,
        corpus_rows=corpus_rows,
        transition_rank=TRANSITION_RANK,
        layers_alone=layers_alone,
        seed=seed,
    )


def train_semi_ar(roots: Sequence[Path], target_dir: Path, start_dir: Path, out: Path, recipe: BlockRecipe) -> None:
    """Train, measure, and write the checkpoint with its card and `drafter.json`.

    Raises IncompatibleError if the model to start from is not the target's, or the state there is another run's.
    """
    train_block_drafter(roots, target_dir, start_dir, out, recipe, SemiArObjective(recipe), STORY)


@dataclass(frozen=True, slots=True)
class SemiArObjective:
    """The target's own distribution at every token of a block, those nearer to its beginning weighing more.

    The target knows the tokens in between and the drafter does not: on average over the target's text, what its masks
    are asked for are the target's marginals, given the last of these tokens where there is a transition.
    """

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
        before = layout.predicted - 1
        terms = distillation_terms(
            logits, batch.top_ids[:, before], batch.top_log_probs[:, before], recipe.total_variation
        )
        return weighted(terms, position_weights(recipe.block, recipe.position_decay))
