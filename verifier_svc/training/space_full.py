"""`coppice train space --full`: SPACE as published. The target itself is tuned, and becomes another model.

Semi-autoregressive fine-tuning (Yi et al. 2402.11809, the layout that keeps whole samples): text has its ordinary loss
and groups of masks after it theirs, in one pass. Lossless then means equal to the tuned target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from coppice.training.acceptance_report import held_out_text
from coppice.training.block_layout import BlockLayout, even_layout, random_layout, token_terms
from coppice.training.block_report import BlockReport, measure_blocks
from coppice.training.checkpoint import save_checkpoint
from coppice.training.loop import Schedule, trained
from coppice.training.run import load_target, open_run
from coppice.training.target_samples import SampleShape
from verifier_svc.extras.redraft.adapter import SpaceAdapter, save_adapter
from verifier_svc.model.made_for import write_target
from verifier_svc.training.space import EVALUATION_BATCHES, EVALUATION_GROUPS, sigmas_of_masks
from verifier_svc.training.space_masks import first_masks


@dataclass(frozen=True, slots=True)
class FullSpaceRecipe:
    """All parameters of a run, except the initial target."""

    steps: int = 1000
    masks: int = 5
    rows: int = 4
    groups: int = 16
    learning_rate: float = 1e-3
    cooldown_share: float = 0.6
    seed: int = 0


class TunedTarget(nn.Module):
    """A trainable target with masks."""

    def __init__(self, target: PreTrainedModel, num_masks: int, seed: int) -> None:
        super().__init__()
        self.target = target
        self.masks = first_masks(target, num_masks, seed)

    def forward(self, token_ids: Tensor, layout: BlockLayout) -> tuple[Tensor, Tensor]:
        """Logits of the text's own rows [R, L, V], and of the blocks after the anchors of `layout` [R, G, 1 + K, V].

        Args:
            token_ids: text [R, L].
            layout: positions of the groups; K is the number of masks.
        """
        target: Any = self.target
        rows, groups = len(token_ids), len(layout.anchors)
        masks = self.masks.weight.repeat(groups, 1).expand(rows, -1, -1)
        logits: Tensor = target(
            inputs_embeds=torch.cat([target.get_input_embeddings()(token_ids), masks], 1),
            attention_mask=layout.visible[None, None].expand(rows, 1, -1, -1),
            position_ids=layout.positions[None].expand(rows, -1),
            use_cache=False,
        ).logits
        text, behind = logits[:, : layout.length], logits[:, layout.length :]
        said = behind.unflatten(1, (groups, layout.num_masks))
        return text, torch.cat([text[:, layout.anchors, None], said], 2)


def train_space_full(roots: Sequence[Path], target_dir: Path, out: Path, recipe: FullSpaceRecipe) -> None:
    """Tune, measure, and write the tuned target with its card, and the masks' adapter next to it.

    Raises IncompatibleError if the state there belongs to another run.
    """
    tokenizer, target = load_target(target_dir, torch.float32)
    store, state_dir = open_run(roots, tokenizer, out, recipe, target=target)
    shape = SampleShape()
    model = TunedTarget(target, recipe.masks, recipe.seed).train()
    held_out = store.held_out_batches(EVALUATION_BATCHES * recipe.rows, recipe.rows, shape.length)
    layout = even_layout(shape.length, shape.prompt_tokens, EVALUATION_GROUPS, recipe.masks, sees_all=False)

    def loss(runner: nn.Module, step: int) -> Tensor:
        token_ids = store.training_batch(recipe.seed, step, recipe.rows, shape.length)
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        places = random_layout(shape.length, recipe.groups, recipe.masks, False, generator)
        text, blocks = runner(token_ids, places)
        own = F.cross_entropy(text[:, :-1].flatten(0, 1).float(), token_ids[:, 1:].flatten())
        return own + token_terms(blocks, token_ids[:, places.predicted])[:, :, 1:].mean()

    def held_out_loss(runner: nn.Module, rows: Tensor) -> Tensor:
        """Loss of the text's own rows: the cost of tuning to the model itself."""
        return token_terms(runner(rows, layout)[0][:, :-1], rows[:, 1:]).mean()

    schedule = Schedule(recipe.steps, recipe.learning_rate, cooldown_share=recipe.cooldown_share)
    loop = trained(model, loss, held_out_loss, held_out, schedule, state_dir, use_compiler=False)
    model.eval()
    text = held_out_text(target, store, shape, recipe.seed)
    report = measure_blocks(target, lambda rows: model(rows, layout)[1], text, layout, recipe.seed)
    adapter = SpaceAdapter(model.masks.weight.detach().bfloat16(), {}, sigmas_of_masks(report))
    extra, title = _card_extra(report, target_dir), "Target tuned for in-pass re-drafts"
    save_checkpoint(target, tokenizer, out, title=title, recipe=recipe, store=store, loop=loop, extra=extra)
    save_adapter(adapter, out)
    write_target(out, target)


def _card_extra(report: BlockReport, target_dir: Path) -> str:
    return f"""
**This is not `{target_dir.name}` any more**: tuning has changed its weights, and a server without loss gives what this
model says, not what `{target_dir.name}` would have said. The held-out figure above is that of its own rows. The masks'
embeddings are in `space.safetensors`: serve it with `--target` and `--space` naming this directory.

{report.described()}

j=1 is its own next token, j=2 what the first mask predicts.
"""
