"""`coppice train semi-ar-features`: a semi-ar drafter, which stays as it is, learns to use the target's hidden states.

The states come with the target's own look at the text. Of every row a part from the beginning, of random length, counts
as the prompt, of which no states are streamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from drafter_svc.drafters.feature_checkpoint import save_feature_inputs, trunk_reference
from drafter_svc.training.block_model import block_logits
from drafter_svc.training.block_run import EVALUATION_BATCHES, EVALUATION_GROUPS, write_calibration
from drafter_svc.training.feature_model import FeatureModel
from drafter_svc.training.models import load_target
from drafter_svc.training.trunk import Trunk, load_trunk
from training.block_layout import BlockLayout, even_layout, random_layout
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
Layers, masks and transition are those of `{trunk}`, which has to be there too. Beside them: a matrix from the target's
hidden state that a committed token was drawn from to that token's input row, and one of rank {rank} from the latest state
to each mask's. Where there is no state nothing is added.

For every committed token the verifier streams that state, {width} numbers in bfloat16: {size:,} bytes per token.
"""


@dataclass(frozen=True, slots=True)
class FeatureRecipe:
    """Everything that decides the result of a run, beside the target and the trunk.

    In every step, `groups` blocks of each of `rows` rows are predicted. `position_decay` is the number of places over
    which a token's weight falls by a factor of e. What masks get of a state has a `rank`. At most `prompt_share` of a row
    counts as the prompt.
    """

    steps: int
    rows: int = 6
    sample_rows: int = 512
    corpus_rows: int = 512
    groups: int = 24
    rank: int = 64
    prompt_share: float = 0.5
    learning_rate: float = 2e-3
    cooldown_share: float = 0.6
    total_variation: float = 0.5
    position_decay: float = 4.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class FeatureObjective:
    """The target's own distribution at every token of blocks at random places, as the trunk was trained for it."""

    recipe: FeatureRecipe
    masks: Tensor

    def loss(self, runner: nn.Module, batch: TaughtRows, step: int) -> Tensor:
        """The loss of a step, a function of model, batch, seed and step."""
        if batch.states is None:
            raise ValueError("the text has no states")
        recipe = self.recipe
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        length = batch.token_ids.shape[1]
        layout = random_layout(length, recipe.groups, len(self.masks), False, generator)
        prompts = torch.randint(int(recipe.prompt_share * length) + 1, (len(batch),), generator=generator)
        logits = self.logits(runner, layout, batch.token_ids, committed_states(batch.states, prompts))
        before = layout.predicted - 1
        terms = distillation_terms(
            logits, batch.top_ids[:, before], batch.top_log_probs[:, before], recipe.total_variation
        )
        return weighted(terms, position_weights(1 + len(self.masks), recipe.position_decay))

    def logits(self, runner: nn.Module, layout: BlockLayout, token_ids: Tensor, features: Tensor) -> Tensor:
        """Scores of all tokens at every place of the layout's blocks."""
        groups = self.masks.expand(len(token_ids), len(layout.anchors), -1)
        logits = block_logits(runner, layout, token_ids, groups, features=features, anchors=layout.anchors)
        return logits[..., : self.masks[0]]


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
    objective = FeatureObjective(recipe, trunk.masks)
    width: int = states_of(target, own.samples[:1, :1]).shape[-1]
    model = FeatureModel(trunk.model, trunk.transition, len(trunk.masks), width, recipe.rank, recipe.seed)
    layout = even_layout(shape.length, shape.prompt_tokens, EVALUATION_GROUPS, len(trunk.masks), False)

    def features_of(rows: Tensor) -> Tensor:
        return committed_states(states_of(target, rows), torch.full((len(rows),), shape.prompt_tokens))

    windows = store.held_out_batches(EVALUATION_BATCHES * recipe.rows, recipe.rows, shape.length)
    held_out = [(rows, features_of(rows)) for rows in windows]

    def loss(runner: nn.Module, step: int) -> Tensor:
        return objective.loss(runner, own.taught.batch(recipe.rows, recipe.seed, step), step)

    def evaluate(runner: nn.Module) -> float:
        losses = [
            float(token_terms(objective.logits(runner, layout, rows, features), rows[:, layout.predicted]).mean())
            for rows, features in held_out
        ]
        return sum(losses) / len(losses)

    schedule = Schedule(recipe.steps, recipe.learning_rate, cooldown_share=recipe.cooldown_share)
    loop = TrainingLoop(model, loss, evaluate, LoopConfig(schedule, state_dir))
    loop.run()
    model.eval()
    text = held_out_text(target, store, shape, recipe.seed)
    with_states, without = (
        measure_blocks(target.float(), predict, text, layout, recipe.seed)
        for predict in (
            lambda rows: objective.logits(model, layout, rows, features_of(rows)),
            lambda rows: objective.logits(model, layout, rows, torch.zeros_like(features_of(rows))),
        )
    )
    inputs = model.inputs()
    save_feature_inputs(inputs, out)
    extra = STORY.format(trunk=trunk_dir.name, rank=recipe.rank, width=width, size=2 * width) + _card_extra(
        with_states, without, own, target_dir, trunk_dir
    )
    parameters = sum(matrix.size for matrix in (inputs.token, inputs.down, inputs.up))
    title = f"Drafter of the kind {KIND}"
    write_card(out, title=title, parameters=parameters, recipe=recipe, store=store, loop=loop, extra=extra)
    _write_calibration(out, trunk, trunk_dir, with_states, shape.length)


def _write_calibration(out: Path, trunk: Trunk, trunk_dir: Path, report: BlockReport, context: int) -> None:
    known = trunk.calibration
    others = {"trunk": trunk_reference(trunk_dir, out)}
    write_calibration(out, KIND, known.block, known.num_masks, report, context, others)


def _card_extra(with_states: BlockReport, without: BlockReport, own: OwnText, target_dir: Path, trunk_dir: Path) -> str:
    return f"""
Trained against `{target_dir.name}` on {own.samples.numel():,} tokens of its own continuations and
{own.windows.numel():,} tokens of corpus text. The held-out figure above is that of whole blocks, every token predicted
without those before it in the block: it does not compare with that of a model that sees them.

Share of {with_states.blocks:,} blocks in the target's continuations of held-out prompts whose j-th token is the first child,
or among the first four, at depth j, both models adding the same noise; the calibrated sigma; and the mean number of
tokens from the block's first on that are first children:

{with_states.table()}

The same blocks and noise without states, which is `{trunk_dir.name}` alone:

{without.table()}
"""
