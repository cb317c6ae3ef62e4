"""`coppice train semi-ar-features`: a semi-ar drafter, which stays as it is, learns to use the target's hidden states.

The states come with the target's own look at the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from drafter_svc.drafters.feature_checkpoint import save_matrices, trunk_reference
from drafter_svc.training.block_run import EVALUATION_BATCHES, EVALUATION_GROUPS, write_calibration
from drafter_svc.training.feature_model import FeatureModel
from drafter_svc.training.models import load_target
from drafter_svc.training.trunk import Trunk, load_trunk
from training.block_layout import even_layout, random_layout
from training.block_losses import position_weights, token_terms, weighted
from training.block_report import BlockReport, measure_blocks
from training.checkpoint import write_card
from training.corpus import read_corpus
from training.held_out_text import held_out_text
from training.loop import LoopConfig, Schedule, TrainingLoop
from training.own_text import OwnText
from training.state import open_state
from training.target_samples import SampleShape
from training.target_states import committed_states, states_of
from training.teacher import TaughtRows, distillation_terms
from training.token_store import TokenStore

KIND = "semi-ar-features"
STORY = """
Layers, masks and transition are those of `{trunk}`, which has to be there too. Beside them there is a head of rank
{rank} for each place: from the target's hidden state that the last committed token was drawn from, and from that token,
to what is added to the place's row before the output layer. Where there is no state nothing is added.

For every committed token the verifier streams that state, {width} numbers in bfloat16: {size:,} bytes per token.
"""


@dataclass(frozen=True, slots=True)
class FeatureRecipe:
    """Everything that decides the result of a run, beside the target and the trunk.

    In every step, `groups` blocks of each of `rows` rows are predicted. `position_decay` is the number of places over
    which a token's weight falls by a factor of e. Heads have a `rank`.
    """

    steps: int
    rows: int = 6
    sample_rows: int = 512
    corpus_rows: int = 512
    groups: int = 64
    rank: int = 96
    learning_rate: float = 1e-3
    cooldown_share: float = 0.6
    total_variation: float = 0.5
    position_decay: float = 4.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class FeatureObjective:
    """The target's own distribution at every token of blocks at random places, as the trunk was trained for it."""

    recipe: FeatureRecipe
    trunk: Trunk

    def loss(self, runner: nn.Module, batch: TaughtRows, step: int) -> Tensor:
        """The loss of a step, a function of model, batch, seed and step."""
        if batch.states is None:
            raise ValueError("the text has no states")
        recipe = self.recipe
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        length = batch.token_ids.shape[1]
        num_masks = len(self.trunk.masks)
        layout = random_layout(length, recipe.groups, num_masks, False, generator)
        features = committed_states(batch.states, 0)
        logits = self.trunk.logits(runner, layout, batch.token_ids, features=features, anchors=layout.anchors)
        before = layout.predicted - 1
        terms = distillation_terms(
            logits, batch.top_ids[:, before], batch.top_log_probs[:, before], recipe.total_variation
        )
        return weighted(terms, position_weights(1 + num_masks, recipe.position_decay))


def train_semi_ar_features(
    roots: Sequence[Path], target_dir: Path, trunk_dir: Path, out: Path, recipe: FeatureRecipe
) -> None:
    """Train, measure beside the trunk alone, and write the checkpoint with its card and `drafter.json`.

    Raises:
        IncompatibleError: the trunk is not one for the target, or the state there is another run's.
    """
    tokenizer, target = load_target(target_dir)
    trunk = load_trunk(trunk_dir, target.config.get_text_config().vocab_size)
    state_dir = open_state(out, recipe)
    store = TokenStore.build(read_corpus(roots), tokenizer, state_dir)
    shape = SampleShape(rows=recipe.sample_rows)
    own = OwnText.build(target, store, shape, recipe.corpus_rows, recipe.seed, state_dir, with_states=True)
    objective = FeatureObjective(recipe, trunk)
    width: int = states_of(target, own.samples[:1, :1]).shape[-1]
    model = FeatureModel(trunk.model, 1 + len(trunk.masks), width, recipe.rank, recipe.seed)
    layout = even_layout(shape.length, shape.prompt_tokens, EVALUATION_GROUPS, len(trunk.masks), False)

    def features_of(rows: Tensor) -> Tensor:
        return committed_states(states_of(target, rows), shape.prompt_tokens)

    windows = store.held_out_batches(EVALUATION_BATCHES * recipe.rows, recipe.rows, shape.length)
    held_out = [(rows, features_of(rows)) for rows in windows]

    def predict(runner: nn.Module, rows: Tensor, features: Tensor) -> Tensor:
        return trunk.logits(runner, layout, rows, features=features, anchors=layout.anchors)

    def loss(runner: nn.Module, step: int) -> Tensor:
        return objective.loss(runner, own.taught.batch(recipe.rows, recipe.seed, step), step)

    def evaluate(runner: nn.Module) -> float:
        losses = [
            float(token_terms(predict(runner, rows, features), rows[:, layout.predicted]).mean())
            for rows, features in held_out
        ]
        return sum(losses) / len(losses)

    schedule = Schedule(recipe.steps, recipe.learning_rate, cooldown_share=recipe.cooldown_share)
    loop = TrainingLoop(model, loss, evaluate, LoopConfig(schedule, state_dir))
    loop.run()
    model.eval()
    text = held_out_text(target, store, shape, recipe.seed)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "With states": lambda rows: predict(model, rows, features_of(rows)),
        f"Without, which is `{trunk_dir.name}` alone": lambda rows: predict(
            model, rows, torch.zeros_like(features_of(rows))
        ),
    }
    reports = {name: measure_blocks(target.float(), way, text, layout, recipe.seed) for name, way in ways.items()}
    save_matrices(model.matrices(), out)
    story = STORY.format(trunk=trunk_dir.name, rank=recipe.rank, width=width, size=2 * width)
    extra = story + _card_extra(reports, own, target_dir)
    title = f"Drafter of the kind {KIND}"
    write_card(out, title=title, parameters=model.num_learned, recipe=recipe, store=store, loop=loop, extra=extra)
    _write_calibration(out, trunk, trunk_dir, next(iter(reports.values())), shape.length)


def _write_calibration(out: Path, trunk: Trunk, trunk_dir: Path, report: BlockReport, context: int) -> None:
    known = trunk.calibration
    others = {"trunk": trunk_reference(trunk_dir, out)}
    write_calibration(out, KIND, known.block, known.num_masks, report, context, others)


def _card_extra(reports: Mapping[str, BlockReport], own: OwnText, target_dir: Path) -> str:
    tables = "\n\n".join(f"{name}:\n\n{report.table()}" for name, report in reports.items())
    blocks = next(iter(reports.values())).blocks
    return f"""
Trained against `{target_dir.name}` on {own.samples.numel():,} tokens of its own continuations and
{own.windows.numel():,} tokens of corpus text. The held-out figure above is that of whole blocks, every token predicted
without those before it in the block: it does not compare with that of a model that sees them.

Share of {blocks:,} blocks in the target's continuations of held-out prompts whose j-th token is the first child, or
among the first four, at depth j, both models adding the same noise; the calibrated sigma; and the mean number of tokens
from the block's first on that are first children. Blocks and noise are the same in all tables.

{tables}
"""
