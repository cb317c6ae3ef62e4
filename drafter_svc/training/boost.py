"""`coppice train boost`: small LMs that add to each other, each trained on what those before it miss.

SpecInfer (2305.09781, section 3) boosts by whole prompts: those whose continuation a small model gets right are left
out of the next one's data. Here a single token is the unit: in the target's text nearly every prompt has some that is
missed and many that are not. A model that was trained on missed tokens alone would lose the path on its way to them, so
the others keep a small weight.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

from coppice.checkpoints.writing import whole_directory
from coppice.training.acceptance_report import (
    TEMPERATURES,
    AcceptanceReport,
    UnionReport,
    gumbel,
    held_out_text,
    measure_acceptance,
    measure_union,
)
from coppice.training.checkpoint import write_card
from coppice.training.corpus import corpus_digest, read_corpus
from coppice.training.loop import Schedule, TrainingLoop, language_model_loss, trained
from coppice.training.state import open_state, weights_digest
from coppice.training.target_samples import OwnText, SampleShape
from coppice.training.teacher import TaughtRows, distillation_terms
from coppice.training.token_store import TokenStore
from drafter_svc.model.layers_checkpoint import save_layers
from drafter_svc.training.models import load_models

EVALUATION_BATCHES = 5
START = "small-lm"


@dataclass(frozen=True, slots=True)
class BoostRecipe:
    """All settings that determine a run, except the target and the small LM that all models start from.

    `number` counts the boosted models from 1; 0 is for the shared data. A token is missed if it is not among the first
    `children` of any earlier model; others have weight `kept_weight`.
    """

    number: int = 0
    steps: int = 2000
    rows: int = 6
    sample_rows: int = 768
    corpus_rows: int = 1536
    learning_rate: float = 1e-3
    cooldown_share: float = 0.6
    total_variation: float = 0.5
    children: int = 2
    kept_weight: float = 0.1
    seed: int = 0


def train_boost(
    roots: Sequence[Path], target_dir: Path, start_dir: Path, out: Path, num_models: int, recipe: BoostRecipe
) -> None:
    """Train one model after another and write them to `out`/boost-1, …, of layers alone, with cards and `drafter.json`.

    Raises IncompatibleError if the model to start from is not the target's, or the state there is another run's.
    """
    tokenizer, target, start = load_models(target_dir, start_dir)
    files = read_corpus(roots)
    made_from = {"target": weights_digest(target), "start": weights_digest(start), "corpus": corpus_digest(files)}
    data_dir = open_state(out / "boost", recipe, made_from)
    store = TokenStore.build(files, tokenizer, data_dir)
    shape = SampleShape(rows=recipe.sample_rows)
    own = OwnText.build(target, store, shape, recipe.corpus_rows, recipe.seed, data_dir)
    text = held_out_text(target, store, shape, recipe.seed)
    models = [start.eval()]
    for number in range(1, num_models + 1):
        directory = out / f"boost-{number}"
        member = replace(recipe, number=number)
        model, loop = _trained(models, own.taught, store, member, open_state(directory, member, made_from))
        models.append(model)
        acceptance = measure_acceptance(target.float(), model, text, shape.prompt_tokens, recipe.seed)
        union = measure_union(target, models, text, shape.prompt_tokens, recipe.seed, recipe.children)
        extra = _card_extra(acceptance, union, member, target_dir, start_dir)
        parameters = sum(value.numel() for value in model.parameters() if value.requires_grad)
        title = f"Boosted small LM {number}"
        with whole_directory(directory) as whole:
            base = save_layers(model, 0, start_dir, whole)
            write_card(whole, title=title, parameters=parameters, recipe=member, store=store, loop=loop, extra=extra)
            calibration = {**acceptance.calibration(shape.length), "base": base}
            (whole / "drafter.json").write_text(json.dumps(calibration) + "\n")


def missed(
    taught: TaughtRows, scores: Sequence[Tensor], children: int, temperatures: Tensor, generator: torch.Generator
) -> Tensor:
    """Whether no model has the target's token among its first children, all with the same noise [rows, length].

    Of the target's distribution only the likeliest tokens are known; children are counted among those.

    Args:
        taught: text with the target's view of it.
        scores: logits of each model [rows, length, vocab].
        children: children per model and position.
        temperatures: temperature of the noise by row [rows].
        generator: random generator of the noise.
    """
    noise = gumbel(taught.top_ids.shape, generator) * temperatures[:, None, None]
    right = (taught.top_log_probs + noise).argmax(-1, keepdim=True)
    found = torch.zeros(right.shape[:-1], dtype=torch.bool)
    for logits in scores:
        sums = logits.float().gather(-1, taught.top_ids) + noise
        found |= (sums > sums.gather(-1, right)).sum(-1) < children
    return ~found


def boosted_loss(
    model: nn.Module, models: Sequence[PreTrainedModel], batch: TaughtRows, recipe: BoostRecipe, step: int
) -> Tensor:
    """Distillation loss with weight 1 for tokens that all `models` miss and `kept_weight` for others."""
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
    drawn = torch.randint(len(TEMPERATURES), (len(batch),), generator=generator)
    with torch.no_grad():
        said = [before(input_ids=batch.token_ids, use_cache=False).logits for before in models]
        is_missed = missed(batch, said, recipe.children, torch.tensor(TEMPERATURES)[drawn], generator)
        weights = torch.where(is_missed, 1.0, recipe.kept_weight)
    logits = model(input_ids=batch.token_ids, use_cache=False).logits
    terms = distillation_terms(logits, batch.top_ids, batch.top_log_probs, recipe.total_variation)
    return (terms * weights).sum() / weights.sum()


def _trained(
    models: Sequence[LlamaForCausalLM], taught: TaughtRows, store: TokenStore, recipe: BoostRecipe, state_dir: Path
) -> tuple[LlamaForCausalLM, TrainingLoop]:
    """A copy of the first of `models`, trained on tokens that all of them miss, with frozen embeddings."""
    model = LlamaForCausalLM(models[0].config)
    model.load_state_dict(models[0].state_dict())
    for embeddings in (model.get_input_embeddings(), model.get_output_embeddings()):
        embeddings.weight.requires_grad_(False)
    held_out = store.held_out_batches(EVALUATION_BATCHES * recipe.rows, recipe.rows, taught.token_ids.shape[1])

    def loss(runner: nn.Module, step: int) -> Tensor:
        return boosted_loss(runner, models, taught.batch(recipe.rows, recipe.seed, step), recipe, step)

    schedule = Schedule(recipe.steps, recipe.learning_rate, cooldown_share=recipe.cooldown_share)
    loop = trained(model.train(), loss, language_model_loss, held_out, schedule, state_dir)
    return model.eval(), loop


def _card_extra(
    acceptance: AcceptanceReport, union: UnionReport, recipe: BoostRecipe, target_dir: Path, start_dir: Path
) -> str:
    names = [START, *(f"boost-{number}" for number in range(1, recipe.number + 1))]
    before = ", ".join(f"`{name}`" for name in names[:-1])
    return f"""
Started from `{start_dir.name}`, whose embeddings it keeps, and trained against `{target_dir.name}` on what {before}
miss: the target's tokens that are not among the first {recipe.children} children of any, all adding the same noise.
Other tokens weigh {recipe.kept_weight:g}. It is not made to be right more often, but where they are wrong.

{acceptance.described()}

The same where one model is added after another, and what as many children of the first one find:

{union.table(names)}
"""
