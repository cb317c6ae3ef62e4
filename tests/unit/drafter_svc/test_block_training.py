"""The recipes of block drafters: layout, losses and report against plain ones, and tiny full runs that resume."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from coppice.core.errors import IncompatibleError
from coppice.core.sampling import SamplingParams
from coppice.training import acceptance_report, loop
from coppice.training.block_layout import (
    BlockLayout,
    diffusion_loss,
    even_layout,
    position_weights,
    random_layout,
    streak_loss,
    token_terms,
)
from coppice.training.block_report import measure_blocks, posterior_noise
from coppice.training.corpus import read_corpus
from coppice.training.loop import LoopConfig
from coppice.training.state import ForeignStateError
from coppice.training.target_samples import SampleShape
from coppice.training.teacher import TOP, TaughtRows
from coppice.training.tokenizer import train_tokenizer
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.block.checkpoint import load_block_calibration
from drafter_svc.drafters.registry import load_drafter
from drafter_svc.model import checkpoint as drafter_checkpoint
from drafter_svc.model.checkpoint import load_fingerprint, load_model
from drafter_svc.model.layers_checkpoint import save_layers
from drafter_svc.training import block_run, diffusion, semi_ar
from drafter_svc.training.block_model import freeze_tokens, mask_ids, new_block_model
from drafter_svc.training.block_run import BlockRecipe, Objective, train_block_drafter
from tests.tiny_checkpoint import ONE_LAYER, tiny_llama

VOCAB = 256
RECIPES: dict[str, tuple[Callable[[BlockRecipe], Objective], float, int]] = {
    "semi-ar": (semi_ar.SemiArObjective, 0.0, 0),
    "diffusion": (diffusion.DiffusionObjective, 0.5, 1),
}


@pytest.fixture(autouse=True)
def quiet_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, and no compiler: tests check results, not speed."""
    torch.set_num_threads(1)
    monkeypatch.setattr("shutil.which", lambda name: None)


def small_llama(seed: int = 0, vocab: int = VOCAB, **changes: Any) -> LlamaForCausalLM:
    parts = {"initializer_range": 0.4, "tie_word_embeddings": True, **ONE_LAYER, **changes}
    return tiny_llama(vocab_size=vocab, max_context_tokens=256, seed=seed, **parts)


def text(rows: int, length: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def plain_block(model: LlamaForCausalLM, tokens: list[int], block: list[int], sees_all: bool) -> torch.Tensor:
    """The oracle: one anchor's block alone, by a plain forward with an explicit mask."""
    rows = len(tokens) + len(block)
    allowed = torch.ones(rows, rows).tril().bool()
    if sees_all:
        allowed[len(tokens) :] = True
    mask = torch.zeros(rows, rows).masked_fill(~allowed, torch.finfo(torch.float32).min)
    logits: torch.Tensor = model(
        input_ids=torch.tensor([tokens + block]), attention_mask=mask[None, None], use_cache=False
    ).logits
    return logits[0, len(tokens) - 1 :]


@pytest.mark.parametrize("sees_all", [False, True])
def test_every_group_is_predicted_as_if_it_stood_alone_behind_its_anchor(sees_all: bool) -> None:
    model, rows = small_llama(num_hidden_layers=2), text(2, 20)
    layout = random_layout(20, 5, 3, sees_all, torch.Generator().manual_seed(1))
    groups = text(2, 15, seed=3).unflatten(1, (5, 3))
    with torch.inference_mode():
        logits = layout.run(model, rows, groups)
    for row in range(2):
        for group, anchor in enumerate(layout.anchors.tolist()):
            alone = plain_block(model, rows[row, : anchor + 1].tolist(), groups[row, group].tolist(), sees_all)
            assert torch.allclose(logits[row, group], alone, atol=1e-4)
            assert layout.predicted[group].tolist() == [anchor + 1 + place for place in range(4)]


def test_layouts_stay_inside_the_row() -> None:
    for seed in range(20):
        layout = random_layout(12, 99, 4, True, torch.Generator().manual_seed(seed))
        assert layout.predicted.max() < 12
        assert len(layout.anchors.unique()) == len(layout.anchors)
    assert even_layout(40, 8, 5, 4, True).predicted.max() < 40
    assert even_layout(40, 8, 5, 4, True).anchors.min() == 8


def test_a_new_model_says_what_it_started_from_says_and_has_masks_besides() -> None:
    start, rows = small_llama(), text(2, 9)
    model = new_block_model(start, num_masks=3, extra_layers=2, seed=0)
    assert model.config.num_hidden_layers == 3
    assert mask_ids(model, 3).tolist() == [256, 257, 258]
    with torch.inference_mode():
        assert torch.allclose(model(rows).logits[..., :VOCAB], start(rows).logits, atol=1e-5)
    masks = model.model.embed_tokens.weight[VOCAB:]
    assert len({tuple(mask.tolist()) for mask in masks}) == 3
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_diffusion_loss_is_unbiased_over_rates_and_patterns() -> None:
    losses = torch.tensor([[[1.0, 2.0, 4.0]]])
    generator = torch.Generator().manual_seed(0)
    values = []
    for _ in range(4000):
        rates = torch.full((1, 1, 3), 0.3 + 0.5 * float(torch.rand((), generator=generator)))
        values.append(float(diffusion_loss(losses, torch.rand(rates.shape, generator=generator) < rates, rates)))
    assert np.mean(values) == pytest.approx(7 / 3, rel=0.05)


def test_streak_loss_weighs_a_token_by_how_likely_those_before_it_are_and_not_by_itself() -> None:
    q = torch.tensor([[[0.5, 0.25, 0.1]]])
    losses = (-q.log()).requires_grad_()
    weights = position_weights(3, decay=2.0)
    loss = streak_loss(losses, losses, weights)
    expected = [float(weights[j]) * before for j, before in enumerate((1.0, 0.5, 0.125))]
    assert loss.item() == pytest.approx(sum(w * -math.log(p) for w, p in zip(expected, (0.5, 0.25, 0.1), strict=True)))
    (gradient,) = torch.autograd.grad(loss, losses)
    assert gradient.flatten().tolist() == pytest.approx(expected)
    assert float(weights.sum()) == pytest.approx(1)
    assert float(weights[2] / weights[0]) == pytest.approx(math.exp(-1))


def test_rates_are_spread_evenly_and_only_over_blocks_that_are_diffused() -> None:
    diffused = torch.tensor([True, False, True, True, True])
    rates = diffusion.mask_rates(diffused, rows=3, block=4, generator=torch.Generator().manual_seed(0))
    assert rates[:, ~diffused].eq(1).all()
    assert rates[..., -1].eq(1).all()
    assert (rates[:, diffused, 0] * 4).floor().long().tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("kind", ["semi-ar", "diffusion"])
def test_a_loss_is_a_function_of_the_step(kind: str) -> None:
    recipe = BlockRecipe(kind, 10, rows=2, block=4, groups=4, diffusion_share=0.5)
    objective = (semi_ar.SemiArObjective if kind == "semi-ar" else diffusion.DiffusionObjective)(recipe)
    model = new_block_model(small_llama(), objective.num_masks, 0, 0)
    batch = TaughtRows(text(2, 24), text(2, 24 * TOP).unflatten(1, (24, TOP)), torch.full((2, 24, TOP), -6.0))
    masks = mask_ids(model, objective.num_masks)
    with torch.no_grad():
        values = [float(objective.loss(model, batch, masks, step)) for step in (0, 0, 1, 9, 9)]
    assert values[0] == values[1] != values[2]
    assert values[3] == values[4]


def test_posterior_noise_makes_the_drawn_token_the_largest_and_has_the_law_of_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0]).expand(20_000, -1)
    drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    noise = posterior_noise(logits, drawn, generator)
    assert torch.equal((logits + noise).argmax(-1), drawn)
    for column in noise.T:
        assert float(column.mean()) == pytest.approx(0.5772, abs=0.04)
        assert float((column < 0).float().mean()) == pytest.approx(math.exp(-1), abs=0.02)


def test_the_report_of_a_drafter_that_knows_the_target_is_right_at_the_first_place() -> None:
    target = small_llama()
    drafter = new_block_model(target, 2, 0, 0)
    layout = even_layout(40, 8, 6, 2, sees_all=False)
    greedy = target.generate(text(12, 8), max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(0)
    drawn = target.generate(text(12, 8), max_new_tokens=32, do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0)
    masks = mask_ids(drafter, 2)

    def predict(rows: torch.Tensor) -> torch.Tensor:
        return layout.run(drafter, rows, masks.expand(len(rows), len(layout.anchors), -1))

    report = measure_blocks(target, predict, {0.0: greedy, 1.0: drawn}, layout, seed=0)
    for temperature in (0.0, 1.0):
        assert report.within_rank[temperature][0] == [1.0] * 4
        assert report.within_rank[temperature][2][0] < 0.9
        assert report.sigmas[temperature][0] < report.sigmas[temperature][2]
        assert 1 <= report.streaks[temperature] < 3
    assert report.blocks == 2 * 12 * 6
    assert report.by_rank == [1.0, 0.0, 0.0, 0.0]
    assert "| 1.0 | sigma |" in report.table()


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, a target and a small LM."""
    directory = tmp_path_factory.mktemp("workshop")
    corpus = directory / "corpus"
    corpus.mkdir()
    for number in range(100):
        lines = f"def function_{number}(value):\n    return value + {number}\n" * 12
        (corpus / f"module_{number}.py").write_text(lines)
    for name, seed in (("target", 0), ("start", 1)):
        train_tokenizer(read_corpus([corpus]), directory / name, vocab_size=300)
        small_llama(seed, vocab=300).save_pretrained(directory / name)
    small_llama(2).save_pretrained(directory / "stranger")
    return directory


def train(
    workshop: Path,
    out: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    start: str = "start",
    *,
    layers_alone: bool = False,
) -> None:
    monkeypatch.setattr(acceptance_report, "EVALUATION_ROWS", 8)
    monkeypatch.setattr(block_run, "EVALUATION_BATCHES", 1)
    monkeypatch.setattr(block_run, "SampleShape", lambda rows: SampleShape(rows, 4, 12, 20))
    monkeypatch.setattr(loop, "LoopConfig", partial(LoopConfig, evaluate_every=4, save_every_s=0.0))
    objective, share, layers = RECIPES[kind]
    rank = 3 if kind == "semi-ar" else 0
    recipe = BlockRecipe(kind, 8, 4, 8, 8, 4, 5, diffusion_share=share, extra_layers=layers, transition_rank=rank)
    recipe = replace(recipe, layers_alone=layers_alone)
    train_block_drafter([workshop / "corpus"], workshop / "target", workshop / start, out, objective(recipe))


@pytest.mark.parametrize("kind", RECIPES)
def test_a_recipe_runs_to_a_checkpoint_that_drafts_and_says_what_it_is(
    workshop: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(workshop, tmp_path / "out", kind, monkeypatch)
    monkeypatch.setattr(drafter_checkpoint, "compiled_ways", list)
    drafter = load_drafter(
        DrafterConfig(model=str(tmp_path / "out"), drafter_kind=kind, device="cpu", draft_min_probability=0.0)
    )
    assert (drafter.info.kind, drafter.info.vocab_size) == (kind, 300)
    assert len(drafter.info.acceptance_by_rank) == 4
    tree = drafter.open([1, 2, 3], SamplingParams(temperature=0.7, seed=1)).draft(12)
    assert len(tree) == 12
    assert 1 <= tree.depth <= 4
    written = json.loads((tmp_path / "out" / "drafter.json").read_text())
    assert [len(sigmas) for sigmas in written["sigmas"].values()] == [4, 4, 4]
    assert load_block_calibration(str(tmp_path / "out"), kind).context == 32
    card = (tmp_path / "out" / "README.md").read_text()
    for fact in (kind, "j=4", "streak", "bits per byte", "t + 1", "| steps | 8 |"):
        assert fact in card
    curve = json.loads((tmp_path / "out" / "recipe.json").read_text())["curve"]
    assert curve[-1]["held_out"] < 8
    with pytest.raises(ForeignStateError, match="another start "):
        train(workshop, tmp_path / "out", kind, monkeypatch, start="target")


@pytest.mark.parametrize("kind", RECIPES)
def test_a_checkpoint_of_layers_alone_drafts_with_the_embeddings_that_it_began_with(
    workshop: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    train(workshop, out, kind, monkeypatch, layers_alone=True)
    assert {path.name for path in out.iterdir()} == {
        "README.md", "config.json", "drafter.json", "layers.safetensors", "recipe.json", "validation_curve.png"
    }  # fmt: skip
    start = LlamaForCausalLM.from_pretrained(workshop / "start")
    kept = load_file(out / "layers.safetensors")
    num_masks = 3 if kind == "semi-ar" else 1
    assert {len(value) for name, value in kept.items() if "embed_tokens" in name or "lm_head" in name} == {num_masks}
    drafter = load_drafter(DrafterConfig(model=str(out), drafter_kind=kind, device="cpu", draft_min_probability=0.0))
    assert (drafter.info.vocab_size, drafter.info.tokenizer_fingerprint) == (300, load_fingerprint(workshop / "start"))
    assert len(drafter.open([1, 2, 3], SamplingParams()).draft(12)) == 12
    state = load_model(str(out), torch.device("cpu")).state_dict()
    assert torch.equal(state["model.embed_tokens.weight"][:300], start.model.embed_tokens.weight.float())
    # Whatever was trained further would have other embeddings.
    described = json.loads((out / "drafter.json").read_text())
    for change, message in (
        ({"path": str(workshop / "target")}, "other embeddings"),
        ({"path": "."}, "layers alone"),
        ({"embeddings": None}, "other embeddings"),
        (None, "does not say whose"),
    ):
        base = None if change is None else {**described["base"], **change}
        (out / "drafter.json").write_text(json.dumps({**described, "base": base}))
        with pytest.raises(IncompatibleError, match=message):
            load_model(str(out), torch.device("cpu"))
    (out / "drafter.json").write_text(json.dumps(described))
    whole = (out / "layers.safetensors").read_bytes()
    (out / "layers.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(IncompatibleError, match="damaged"):
        load_model(str(out), torch.device("cpu"))


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_of_tokens_stay_where_they_are_frozen(tied: bool) -> None:
    model = new_block_model(small_llama(tie_word_embeddings=tied), 3, 0, 0).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    freeze_tokens(model, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    tokens = torch.tensor([[1, 7, VOCAB, VOCAB + 1, VOCAB + 2, 9]])
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    for name, value in model.state_dict().items():
        learned = (value - before[name]).abs()
        if "embed_tokens" in name or "lm_head" in name:
            assert learned[:VOCAB].eq(0).all()
            learned = learned[VOCAB:]
        assert learned.max() > 0


def test_layers_are_kept_to_eight_bits_and_everything_else_to_sixteen(tmp_path: Path) -> None:
    start = small_llama(tie_word_embeddings=False)
    start.save_pretrained(tmp_path / "start")
    model = new_block_model(start, num_masks=3, extra_layers=1, seed=0)
    with torch.no_grad():
        for value in model.model.layers.parameters():
            value += 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
    base = save_layers(model, 3, tmp_path / "start", tmp_path / "deep" / "out")
    assert base["path"] == "../../start"
    (tmp_path / "deep" / "out" / "drafter.json").write_text(json.dumps({"base": base}))
    loaded = load_model(str(tmp_path / "deep" / "out"), torch.device("cpu")).state_dict()
    for name, value in model.state_dict().items():
        change = (loaded[name] - value).abs().max()
        assert change <= 0.005 * value.abs().max(), name
    kept = load_file(tmp_path / "deep" / "out" / "layers.safetensors")
    assert kept["model.layers.0.self_attn.q_proj.weight"].dtype == torch.int8
    assert kept["model.norm.weight"].dtype == torch.bfloat16


class KilledError(Exception):
    """Stands for whatever kills a run."""


@pytest.mark.parametrize("kind", RECIPES)
def test_a_resumed_training_equals_an_uninterrupted_one(
    workshop: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(workshop, tmp_path / "whole", kind, monkeypatch)
    chosen = semi_ar.SemiArObjective if kind == "semi-ar" else diffusion.DiffusionObjective
    with pytest.MonkeyPatch.context() as patch:
        original = chosen.loss

        def loss(self: Any, model: Any, batch: TaughtRows, masks: torch.Tensor, step: int) -> torch.Tensor:
            if step == 5:
                raise KilledError
            return original(self, model, batch, masks, step)

        patch.setattr(chosen, "loss", loss)
        with pytest.raises(KilledError):
            train(workshop, tmp_path / "killed", kind, monkeypatch)
    train(workshop, tmp_path / "killed", kind, monkeypatch)
    for name in ("model.safetensors", "drafter.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_model_of_another_vocabulary_is_no_start(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(IncompatibleError, match="256 tokens"):
        train(workshop, tmp_path / "out", "semi-ar", monkeypatch, start="stranger")


def test_training_lowers_the_loss_of_masks() -> None:
    """Texts of one token each: a mask has to learn to say it again."""
    recipe = BlockRecipe("semi-ar", 60, rows=4, block=4, groups=6, total_variation=0.0)
    objective = semi_ar.SemiArObjective(recipe)
    model = new_block_model(small_llama(), objective.num_masks, 0, 0).train()
    masks = mask_ids(model, objective.num_masks)
    rows = torch.arange(0, 64, 8)[:, None].expand(-1, 24)
    nexts = (rows[..., None] + torch.arange(TOP)) % VOCAB
    taught = TaughtRows(rows, nexts.int(), torch.full((*rows.shape, TOP), -20.0).index_fill_(-1, torch.tensor([0]), 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(60):
        loss = objective.loss(model, taught.batch(4, 0, step), masks, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])
    layout = BlockLayout(24, torch.tensor([10]), 3, sees_all=False)
    with torch.no_grad():
        logits = layout.run(model.eval(), rows, masks.expand(len(rows), 1, -1))[..., :VOCAB]
    assert float(token_terms(logits, rows[:, layout.predicted]).mean()) < 2.0
