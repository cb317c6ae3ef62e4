"""Shared parts of the block drafters' recipes: text that the target has looked at, loop, report, checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from coppice.checkpoints.writing import whole_directory
from coppice.training.acceptance_report import held_out_text
from coppice.training.block_layout import even_layout, token_terms
from coppice.training.block_report import BlockReport, measure_blocks
from coppice.training.checkpoint import save_checkpoint, write_card
from coppice.training.loop import Schedule, trained
from coppice.training.run import open_run
from coppice.training.target_samples import OwnText, SampleShape
from coppice.training.teacher import TaughtRows
from drafter_svc.model.layers_checkpoint import save_layers
from drafter_svc.training.block_model import block_logits, freeze_tokens, mask_ids, new_block_model
from drafter_svc.training.models import load_models

EVALUATION_GROUPS = 8
EVALUATION_BATCHES = 4
BLOCKS_HELD_OUT = """The held-out figure above is that of whole blocks, every
token predicted without those before it in the block: it does not compare with that of a model that sees them."""


@dataclass(frozen=True, slots=True)
class BlockRecipe:
    """All settings that determine a run, except the target and the starting model.

    A block has `block` tokens; each step predicts `groups` blocks in each of `rows` rows. `position_decay` is the
    number of positions over which a token's weight falls by a factor of e. `diffusion_share` is the fraction of steps
    on the diffusion objective only; 0 for drafts that are not denoised. `transition_rank` is the rank of the
    transition; 0 for none. `layers_alone`: token embeddings are frozen and not part of the checkpoint.
    """

    kind: str
    steps: int = 3000
    rows: int = 6
    sample_rows: int = 768
    corpus_rows: int = 1536
    block: int = 8
    groups: int = 24
    learning_rate: float = 1e-3
    cooldown_share: float = 0.6
    total_variation: float = 0.5
    position_decay: float = 4.0
    extra_layers: int = 0
    diffusion_share: float = 0.0
    transition_rank: int = 0
    layers_alone: bool = False
    seed: int = 0


class Objective(Protocol):
    """Training objective of a kind: `usual` is its recipe by default, `story` what the card says of it."""

    usual: ClassVar[BlockRecipe]
    story: ClassVar[str]

    def __init__(self, recipe: BlockRecipe) -> None: ...

    @property
    def recipe(self) -> BlockRecipe:
        """The run's recipe."""

    @property
    def sees_all(self) -> bool:
        """Whether a block's rows see those after them."""

    @property
    def num_masks(self) -> int:
        """Ids added to the vocabulary."""

    def loss(self, model: nn.Module, batch: TaughtRows, masks: Tensor, step: int) -> Tensor:
        """Loss of a step, a function of model, batch, seed and step; `masks` are ids of the vocabulary."""


def train_block_drafter(
    roots: Sequence[Path],
    target_dir: Path,
    start_dir: Path,
    out: Path,
    objective: Objective,
) -> None:
    """Train, measure, and write the checkpoint with its card and `drafter.json`.

    Raises IncompatibleError if the model to start from is not the target's, or the state there is another run's.
    """
    recipe = objective.recipe
    tokenizer, target, start = load_models(target_dir, start_dir)
    store, state_dir = open_run(roots, tokenizer, out, recipe, target=target, start=start)
    shape = SampleShape(rows=recipe.sample_rows)
    own = OwnText.build(target, store, shape, recipe.corpus_rows, recipe.seed, state_dir)
    rank = recipe.transition_rank
    model = new_block_model(start, objective.num_masks, recipe.extra_layers, recipe.seed, rank).train()
    if recipe.layers_alone:
        freeze_tokens(model, objective.num_masks)
    masks = mask_ids(model, objective.num_masks)
    # A block's rows hold the masks in order, or a single one repeated.
    filling = masks[torch.arange(recipe.block - 1) % len(masks)]
    held_out = store.held_out_batches(EVALUATION_BATCHES * recipe.rows, recipe.rows, shape.length)
    layout = even_layout(shape.length, shape.prompt_tokens, EVALUATION_GROUPS, len(filling), objective.sees_all)

    def loss(runner: nn.Module, step: int) -> Tensor:
        return objective.loss(runner, own.taught.batch(recipe.rows, recipe.seed, step), masks, step)

    def predict(runner: nn.Module, rows: Tensor) -> Tensor:
        return block_logits(runner, layout, rows, filling.expand(len(rows), EVALUATION_GROUPS, -1))

    def held_out_loss(runner: nn.Module, rows: Tensor) -> Tensor:
        return token_terms(predict(runner, rows)[..., : masks[0]], rows[:, layout.predicted]).mean()

    schedule = Schedule(recipe.steps, recipe.learning_rate, cooldown_share=recipe.cooldown_share)
    loop = trained(model, loss, held_out_loss, held_out, schedule, state_dir)
    text = held_out_text(target, store, shape, recipe.seed)
    report = measure_blocks(target.float(), partial(predict, model.eval()), text, layout, recipe.seed)
    extra = f"{objective.story}\n{_card_extra(report, own, target_dir, start_dir)}"
    title = f"Drafter of the kind {recipe.kind}"
    card: Any = {"title": title, "recipe": recipe, "store": store, "loop": loop, "extra": extra}
    with whole_directory(out) as whole:
        others = {}
        if recipe.layers_alone:
            others["base"] = save_layers(model, objective.num_masks, start_dir, whole)
            parameters = sum(value.numel() for value in model.parameters()) - start.model.embed_tokens.weight.numel()
            write_card(whole, parameters=parameters, **card)
        else:
            save_checkpoint(model, tokenizer, whole, **card)
        write_calibration(whole, recipe.kind, recipe.block, objective.num_masks, report, shape.length, others)


def write_calibration(
    out: Path,
    kind: str,
    block: int,
    num_masks: int,
    report: BlockReport,
    context: int,
    others: Mapping[str, object] | None = None,
) -> None:
    """Write `drafter.json`, which makes the checkpoint a drafter's; `context` is the length of training rows.

    `others` are further entries.
    """
    calibration = {
        "kind": kind,
        "num_masks": num_masks,
        "block": block,
        "sigmas": report.sigmas,
        "acceptance_by_rank": report.by_rank,
        "within_rank": report.within_rank,
        "streaks": report.streaks,
        "context": context,
        **(others or {}),
    }
    (out / "drafter.json").write_text(json.dumps(calibration) + "\n")


def _card_extra(report: BlockReport, own: OwnText, target_dir: Path, start_dir: Path) -> str:
    return f"""
Started from `{start_dir.name}` and trained against `{target_dir.name}` on
{own.described()}. {BLOCKS_HELD_OUT}

{report.described()}
"""
