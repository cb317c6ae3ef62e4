"""`coppice train small-lm`: a small Llama distilled from the target, on the target's own text and on the corpus.

A first cycle learns from rows that the target has looked at once, whose view of them is kept: cheap steps, over the
same rows again and again. It ends with the rows half known by heart. The cycles after it pay the target's pass in
every step, for corpus rows drawn again each time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from coppice.checkpoints.writing import whole_directory
from coppice.training.acceptance_report import AcceptanceReport, held_out_text, measure_acceptance
from coppice.training.checkpoint import save_checkpoint
from coppice.training.loop import Cycles, Schedule, language_model_loss, trained
from coppice.training.run import load_target, open_run
from coppice.training.target_samples import OwnText, SampleShape
from coppice.training.teacher import distillation_loss, full_distillation_loss
from coppice.training.token_store import TokenStore

# Two layers: the second can look for what followed an earlier occurrence, which code is full of.
LAYERS = 2
HIDDEN = 256
INTERMEDIATE = 640
HEADS = 4
KV_HEADS = 2
EVALUATION_BATCHES = 5


@dataclass(frozen=True, slots=True)
class SmallLmRecipe:
    """Everything that decides the result of a run: rows of the target's own text and of corpus text, drawn alike.

    `steps` are those over kept rows; after them come `fresh_cycles` cycles of `fresh_steps` each, of whose `rows`
    `fresh_rows` are newly drawn corpus text.
    """

    steps: int = 9000
    rows: int = 9
    sample_rows: int = 3072
    corpus_rows: int = 6144
    learning_rate: float = 4e-3
    cooldown_share: float = 0.5
    # Weight of the total variation distance next to the divergence; it is what acceptance is made of.
    total_variation: float = 1.0
    fresh_cycles: int = 2
    fresh_steps: int = 4500
    fresh_rows: int = 6
    fresh_learning_rate: float = 2e-3
    seed: int = 0

    def schedule(self) -> Cycles:
        """The learning rate of all cycles."""
        kept = Schedule(self.steps, self.learning_rate, cooldown_share=self.cooldown_share)
        fresh = Schedule(self.fresh_steps, self.fresh_learning_rate, cooldown_share=1.0)
        return Cycles((kept, *[fresh] * self.fresh_cycles))


def new_small_lm(target: PreTrainedModel, seed: int) -> LlamaForCausalLM:
    """A two-layer Llama whose embeddings start as the principal components of the target's."""
    torch.manual_seed(seed)
    source = target.config
    config = LlamaConfig(
        vocab_size=source.vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=source.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        pad_token_id=source.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    embeddings: Tensor = target.get_input_embeddings().weight.detach().float()  # type: ignore[operator]
    left, values, _ = torch.linalg.svd(embeddings, full_matrices=False)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(left[:, :HIDDEN] * values[:HIDDEN])
    return model


def train_small_lm(roots: Sequence[Path], target_dir: Path, out: Path, recipe: SmallLmRecipe) -> None:
    """Sample the target, distil, calibrate, and write the checkpoint with its card and `drafter.json`.

    Raises IncompatibleError if the target cannot be read, or the state there is another run's.
    """
    tokenizer, target = load_target(target_dir)
    store, state_dir = open_run(roots, tokenizer, out, recipe, target=target)
    shape = SampleShape(rows=recipe.sample_rows)
    own = OwnText.build(target, store, shape, recipe.corpus_rows, recipe.seed, state_dir)
    model = new_small_lm(target, recipe.seed).train()
    kept_loss, fresh_loss, teacher = _fused(distillation_loss), _fused(full_distillation_loss), _fused(target)
    held_out = store.held_out_batches(windows=EVALUATION_BATCHES * recipe.rows, rows=recipe.rows, length=shape.length)

    def loss(runner: nn.Module, step: int) -> Tensor:
        if step < recipe.steps:
            batch = own.taught.batch(recipe.rows, recipe.seed, step)
            logits = runner(input_ids=batch.token_ids, use_cache=False).logits
            value: Tensor = kept_loss(logits, batch.top_ids, batch.top_log_probs, recipe.total_variation)
            return value
        token_ids = fresh_rows(own.samples, store, recipe, step, shape.length)
        with torch.no_grad():
            teacher_logits = teacher(input_ids=token_ids, use_cache=False).logits
        logits = runner(input_ids=token_ids, use_cache=False).logits
        value = fresh_loss(logits, teacher_logits, recipe.total_variation)
        return value

    loop = trained(model, loss, language_model_loss, held_out, recipe.schedule(), state_dir)
    rows = held_out_text(target, store, shape, recipe.seed)
    report = measure_acceptance(target.float(), model.eval(), rows, shape.prompt_tokens, recipe.seed)
    fresh_tokens = recipe.fresh_cycles * recipe.fresh_steps * recipe.fresh_rows * shape.length
    extra = _card_extra(report, own, fresh_tokens, target_dir)
    card: Any = {"title": "Bundled small LM", "recipe": recipe, "store": store, "loop": loop, "extra": extra}
    with whole_directory(out) as whole:
        save_checkpoint(model, tokenizer, whole, **card)
        # It guesses badly beyond the context that it was trained on.
        (whole / "drafter.json").write_text(json.dumps(report.calibration(shape.length)) + "\n")


def fresh_rows(samples: Tensor, store: TokenStore, recipe: SmallLmRecipe, step: int, length: int) -> Tensor:
    """Rows of a step of a fresh cycle [rows, length]: newly drawn corpus text, and some of the target's own."""
    corpus = store.training_batch(recipe.seed, step, recipe.fresh_rows, length)
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
    chosen = torch.randint(len(samples), (recipe.rows - recipe.fresh_rows,), generator=generator)
    return torch.cat([samples[chosen], corpus])


def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled where there is a C++ compiler; slower, not different in kind, where there is none."""
    return torch.compile(function, dynamic=False) if shutil.which("g++") else function


def _card_extra(report: AcceptanceReport, own: OwnText, fresh_tokens: int, target_dir: Path) -> str:
    return f"""
Distilled from `{target_dir.name}` on {own.described()}
(half of the continuations at T = 1, a quarter each at 0.7 and greedy), again and again, then on these continuations and
{fresh_tokens:,} tokens of corpus text that was drawn anew in every step.

{report.described()}
"""
