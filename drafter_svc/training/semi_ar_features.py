"""`coppice train semi-ar-features`: a semi-ar drafter, which stays as it is, learns to use the target's hidden states.

The states come with the target's own look at the text. Heads are fitted by Newton's method (`head_fit.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from coppice.training.acceptance_report import held_out_text
from coppice.training.block_layout import even_layout
from coppice.training.block_losses import token_terms
from coppice.training.block_report import BlockReport, measure_blocks
from coppice.training.checkpoint import write_card
from coppice.training.run import load_target, open_run
from coppice.training.target_samples import OwnText, SampleShape
from coppice.training.teacher import committed_states, states_of
from drafter_svc.drafters.features.checkpoint import save_matrices, trunk_reference
from drafter_svc.training.block_run import (
    BLOCKS_HELD_OUT,
    EVALUATION_BATCHES,
    EVALUATION_GROUPS,
    write_calibration,
)
from drafter_svc.training.head_run import FeatureRecipe, HeadRun
from drafter_svc.training.trunk import load_trunk

KIND = "semi-ar-features"
STORY = """
Layers, masks and transition are those of `{trunk}`, which has to be there too. Added is a linear head for
each place, of rank {rank} together: from the target's hidden state that the last committed token was drawn from, and
from that token, to what is added to the place's row before the output layer. Where there is no state nothing is added.

For every committed token the verifier streams that state, {width} numbers in bfloat16: {size:,} bytes per token.
"""


def train_semi_ar_features(
    roots: Sequence[Path], target_dir: Path, trunk_dir: Path, out: Path, recipe: FeatureRecipe
) -> None:
    """Train, measure next to the trunk alone, and write the checkpoint with its card and `drafter.json`.

    Raises IncompatibleError if the trunk is not one for the target, or the state there is another run's.
    """
    tokenizer, target = load_target(target_dir)
    trunk = load_trunk(trunk_dir, target.config.get_text_config().vocab_size)
    store, state_dir = open_run(roots, tokenizer, out, recipe, target=target, trunk=trunk.model)
    shape = SampleShape(rows=recipe.sample_rows)
    own = OwnText.build(target, store, shape, recipe.corpus_rows, recipe.seed, state_dir, with_states=True)
    width: int = states_of(target, own.samples[:1, :1]).shape[-1]
    layout = even_layout(shape.length, shape.prompt_tokens, EVALUATION_GROUPS, trunk.calibration.num_masks, False)

    def predict(heads: Tensor, rows: Tensor) -> Tensor:
        features = committed_states(states_of(target, rows), shape.prompt_tokens)
        said = torch.einsum("phd,rgd->rgph", heads, trunk.inputs(layout, rows, features))
        return trunk.logits(layout, rows, trunk.rows(layout, rows) + said)

    windows = store.held_out_batches(EVALUATION_BATCHES * recipe.rows, recipe.rows, shape.length)

    def held_out(heads: Tensor) -> float:
        losses = [float(token_terms(predict(heads, rows), rows[:, layout.predicted]).mean()) for rows in windows]
        return sum(losses) / len(losses)

    run = HeadRun(trunk, own.taught, recipe, state_dir)
    run.run(held_out)
    down, up = run.sums.reduced(run.heads, recipe.rank)
    text = held_out_text(target, store, shape, recipe.seed)
    ways = {"With states": up @ down, f"Without, which is `{trunk_dir.name}` alone": torch.zeros_like(run.heads)}
    target = target.float()
    reports = {
        name: measure_blocks(target, partial(predict, heads), text, layout, recipe.seed) for name, heads in ways.items()
    }
    of_feature, of_token = down.split((width, len(down[0]) - width), 1)
    matrices = {"of_feature": of_feature, "of_token": of_token, "up": up}
    save_matrices({name: matrix.contiguous().numpy() for name, matrix in matrices.items()}, out)
    story = STORY.format(trunk=trunk_dir.name, rank=recipe.rank, width=width, size=2 * width)
    extra = story + _card_extra(reports, own, target_dir)
    title = f"Drafter of the kind {KIND}"
    write_card(
        out, title=title, parameters=down.numel() + up.numel(), recipe=recipe, store=store, loop=run, extra=extra
    )
    known, others = trunk.calibration, {"trunk": trunk_reference(trunk_dir, out)}
    first = next(iter(reports.values()))
    write_calibration(out, KIND, known.block, known.num_masks, first, shape.length, others)


def _card_extra(reports: Mapping[str, BlockReport], own: OwnText, target_dir: Path) -> str:
    tables = "\n\n".join(f"{name}. {report.described()}" for name, report in reports.items())
    return f"""
Trained against `{target_dir.name}` on {own.described()}.
{BLOCKS_HELD_OUT} Blocks and noise are the same in all tables.

{tables}
"""
