"""`coppice train space`: masks after a frozen target's rows learn to draft for it (SPACE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from coppice.checkpoints.writing import whole_directory
from coppice.search.error_scales import ErrorScales
from coppice.training.acceptance_report import held_out_text
from coppice.training.block_layout import even_layout, position_weights, random_layout, token_terms, weighted
from coppice.training.block_report import BlockReport, measure_blocks
from coppice.training.checkpoint import write_card
from coppice.training.loop import Schedule, trained
from coppice.training.run import load_target, open_run
from coppice.training.target_samples import OwnText, SampleShape
from verifier_svc.extras.redraft.adapter import save_adapter
from verifier_svc.model.made_for import write_target
from verifier_svc.training.space_masks import SpaceMasks

EVALUATION_GROUPS = 8
EVALUATION_BATCHES = 4


@dataclass(frozen=True, slots=True)
class SpaceRecipe:
    """All parameters of a run, except the target.

    A step predicts `groups` groups of `masks` masks after each of `rows` rows. A mask's weight falls by a factor of e
    over `position_decay` positions. `rank` is that of the additions to the target's layers, `transition_rank` that of
    the transition. `modules` are the linear layers with additions, by the last part of their names; all if empty.
    """

    steps: int = 1000
    masks: int = 5
    rank: int = 16
    modules: tuple[str, ...] = ()
    transition_rank: int = 64
    rows: int = 4
    groups: int = 32
    sample_rows: int = 768
    corpus_rows: int = 1536
    learning_rate: float = 6e-3
    cooldown_share: float = 0.6
    total_variation: float = 0.5
    position_decay: float = 2.0
    seed: int = 0


def train_space(roots: Sequence[Path], target_dir: Path, out: Path, recipe: SpaceRecipe) -> None:
    """Train, measure, and write the adapter with its card.

    A mask learns the target's distribution at its position, in the target's own text and in the corpus (2402.11809, the
    layout that keeps whole samples, with many groups). The target attends to the tokens in between and the mask does
    not, so it learns the target's marginals, averaged over text. The last of these tokens is known when the draft is
    made; the transition learns its effect on the next one. Raises IncompatibleError if the target has no layers for
    additions, or the state there belongs to another run.
    """
    tokenizer, target = load_target(target_dir, torch.float32)
    store, state_dir = open_run(roots, tokenizer, out, recipe, target=target)
    shape = SampleShape(rows=recipe.sample_rows)
    own = OwnText.build(target, store, shape, recipe.corpus_rows, recipe.seed, state_dir)
    held_out = store.held_out_batches(EVALUATION_BATCHES * recipe.rows, recipe.rows, shape.length)
    model = SpaceMasks(
        target,
        recipe.masks,
        recipe.rank,
        recipe.seed,
        modules=recipe.modules,
        transition_rank=recipe.transition_rank,
    )
    layout = even_layout(shape.length, shape.prompt_tokens, EVALUATION_GROUPS, recipe.masks, sees_all=False)
    weights = position_weights(recipe.masks, recipe.position_decay)

    def loss(runner: nn.Module, step: int) -> Tensor:
        batch = own.taught.batch(recipe.rows, recipe.seed, step)
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        places = random_layout(shape.length, recipe.groups, recipe.masks, False, generator)
        logits = runner(batch.token_ids, places)[:, :, 1:]
        return weighted(batch.terms(logits, places.predicted[:, 1:], recipe.total_variation), weights)

    def held_out_loss(runner: nn.Module, rows: Tensor) -> Tensor:
        return token_terms(runner(rows, layout), rows[:, layout.predicted])[:, :, 1:].mean()

    schedule = Schedule(recipe.steps, recipe.learning_rate, cooldown_share=recipe.cooldown_share)
    loop = trained(model, loss, held_out_loss, held_out, schedule, state_dir, use_compiler=False)
    text = held_out_text(target, store, shape, recipe.seed)
    report = measure_blocks(target, lambda rows: model(rows, layout), text, layout, recipe.seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    extra = _card_extra(report, own, target_dir)
    title = "Adapter for in-pass re-drafts"
    with whole_directory(out) as whole:
        save_adapter(model.adapter(sigmas_of_masks(report)), whole)
        write_target(whole, target)
        write_card(whole, title=title, parameters=parameters, recipe=recipe, store=store, loop=loop, extra=extra)


def sigmas_of_masks(report: BlockReport) -> ErrorScales:
    """Scales of a report without the first position, which is the target's own and not a mask's."""
    return tuple(sorted((temperature, tuple(scales[1:])) for temperature, scales in report.sigmas.items()))


def _card_extra(report: BlockReport, own: OwnText, target_dir: Path) -> str:
    return f"""
Belongs to `{target_dir.name}`, whose weights it leaves as they are and whose own rows it does not act on: outputs are
those of the target. Trained on {own.described()}. The held-out figure above is that of
masks, each predicted without the tokens between it and the last committed one, save for what the token before says: it
does not compare with that of a model that sees them.

{report.described()}

j=1 is the target's own next token, j=2 what the first mask predicts.
"""
