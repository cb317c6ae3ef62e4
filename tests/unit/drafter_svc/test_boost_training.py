"""Boosted small LMs: what counts as missed, that a model learns it, what several find together, and a tiny full run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from coppice.core.errors import IncompatibleError
from coppice.core.sampling import SamplingParams
from coppice.training import acceptance_report
from coppice.training.acceptance_report import measure_union
from coppice.training.corpus import read_corpus
from coppice.training.state import ForeignStateError
from coppice.training.target_samples import SampleShape
from coppice.training.teacher import TaughtRows
from coppice.training.tokenizer import train_tokenizer
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.registry import load_drafter
from drafter_svc.model import checkpoint as drafter_checkpoint
from drafter_svc.model.checkpoint import load_calibration
from drafter_svc.training import boost
from drafter_svc.training.boost import BoostRecipe, boosted_loss, missed
from tests.tiny_checkpoint import ONE_LAYER, tiny_llama

VOCAB = 16


@pytest.fixture(autouse=True)
def quiet_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, and no compiler: tests check results, not speed."""
    torch.set_num_threads(1)
    monkeypatch.setattr("shutil.which", lambda name: None)


def small(seed: int = 0, vocab_size: int = VOCAB) -> LlamaForCausalLM:
    return tiny_llama(vocab_size=vocab_size, max_context_tokens=256, seed=seed, initializer_range=0.4, **ONE_LAYER)


def taught(follow: Callable[[Tensor], Tensor], rows: int, seed: int) -> TaughtRows:
    """Random text of which the target is sure that `follow` of a token comes behind it."""
    token_ids = torch.randint(VOCAB, (rows, 12), generator=torch.Generator().manual_seed(seed))
    scores = 30.0 * nn.functional.one_hot(follow(token_ids), VOCAB)
    top = scores.float().log_softmax(-1).topk(VOCAB)
    return TaughtRows(token_ids, top.indices, top.values)


def test_a_token_is_missed_that_no_model_has_among_its_first_children() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = TaughtRows(
        torch.zeros(2, 5, dtype=torch.long),
        torch.stack([torch.randperm(VOCAB, generator=generator)[:6] for _ in range(10)]).view(2, 5, 6),
        torch.randn(2, 5, 6, generator=generator),
    )
    models = [torch.randn(2, 5, VOCAB, generator=generator) for _ in range(2)]
    temperatures = torch.tensor([0.0, 1.5])
    found = missed(batch, models, 2, temperatures, torch.Generator().manual_seed(7))
    uniform = torch.rand(2, 5, 6, generator=torch.Generator().manual_seed(7))
    seen = set()
    for row in range(2):
        for at in range(5):
            ids = batch.top_ids[row, at].tolist()
            noise = (-(-uniform[row, at].log()).log() * temperatures[row]).tolist()
            own = [float(score) + extra for score, extra in zip(batch.top_log_probs[row, at], noise, strict=True)]
            right = own.index(max(own))
            is_found = False
            for logits in models:
                sums = [float(logits[row, at, token]) + extra for token, extra in zip(ids, noise, strict=True)]
                is_found |= right in sorted(range(6), key=lambda place, sums=sums: -sums[place])[:2]
            assert bool(found[row, at]) is not is_found
            seen.add(is_found)
    assert seen == {True, False}


def test_a_model_learns_what_the_one_before_it_misses() -> None:
    """The first one adds 1 to every token; of odd ones the target adds 7."""

    def train(model: LlamaForCausalLM, loss: Callable[[int], Tensor]) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(80):
            loss(step).backward()
            optimizer.step()
            optimizer.zero_grad()

    def right(model: LlamaForCausalLM, at: Tensor) -> float:
        said = model(input_ids=batch.token_ids).logits.argmax(-1)
        return float((said == batch.top_ids[..., 0])[at].float().mean())

    first, second = small(), small(1)
    recipe = BoostRecipe(rows=16, children=1)
    plain = taught(lambda tokens: (tokens + 1) % VOCAB, 64, seed=0)
    train(first, lambda step: boosted_loss(first, [], plain.batch(16, 0, step), recipe, step))
    rows = taught(lambda tokens: (tokens + 1 + 6 * (tokens % 2)) % VOCAB, 64, seed=1)
    train(second, lambda step: boosted_loss(second, [first], rows.batch(16, 0, step), recipe, step))
    batch = taught(lambda tokens: (tokens + 1 + 6 * (tokens % 2)) % VOCAB, 16, seed=2)
    is_odd = batch.token_ids % 2 == 1
    with torch.no_grad():
        assert right(first, ~is_odd) > 0.95
        assert right(first, is_odd) < 0.05
        assert right(second, is_odd) > 0.95
        # The path on its way to them is not to be lost, either.
        assert right(second, ~is_odd) > 0.7


def test_what_the_models_miss_weighs_as_much_as_the_recipe_says() -> None:
    model, batch = small(), taught(lambda tokens: (tokens + 1) % VOCAB, 4, seed=3)
    sure = nn.functional.one_hot((batch.token_ids + 1) % VOCAB, VOCAB).float()
    sure[:, :3] = 0
    sure[:, :3, 0] = 1.0

    class Said(nn.Module):
        def forward(self, **_: object) -> object:
            return type("Output", (), {"logits": 50 * sure})

    recipe = BoostRecipe(children=1, kept_weight=0.25)
    is_missed = missed(batch, [50 * sure], 1, torch.zeros(4), torch.Generator())
    assert 0 < is_missed.float().mean() < 0.3
    settings = (([Said()], recipe), ([Said()], replace(recipe, kept_weight=0.0)), ([], recipe))
    losses = [boosted_loss(model, models, batch, one, step=0).item() for models, one in settings]  # type: ignore[arg-type]
    loss, alone, everything = losses
    assert len({round(value, 3) for value in losses}) == 3
    share = float(is_missed.float().mean())
    # All of the text is what is missed and what is not.
    others = (everything - share * alone) / (1 - share)
    expected = (share * alone + (1 - share) * 0.25 * others) / (share + (1 - share) * 0.25)
    assert loss == pytest.approx(expected, rel=1e-4)


def test_what_several_find_together_is_counted_once() -> None:
    target, other = small(0), small(1)
    rows = {t: torch.randint(VOCAB, (6, 20), generator=torch.Generator().manual_seed(4)) for t in (0.0, 1.0)}
    report = measure_union(target, [other, other, target], rows, prompt_tokens=4, seed=0, children=2)
    for temperature in rows:
        first, again, with_target = report.within_any[temperature]
        assert first == again < 0.9
        assert with_target == 1.0
        alone = report.within_first[temperature]
        assert alone[0] == first
        assert alone == sorted(alone)
        assert alone[2] > alone[0]
    table = report.table(["small-lm", "boost-1", "boost-2"]).splitlines()
    assert "| small-lm | + boost-1 | + boost-2 |" in table[0]
    assert [line.count("|") for line in table] == [6] * 6


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, and a tokenizer, a target and a model to start from of its vocabulary."""
    directory = tmp_path_factory.mktemp("workshop")
    (directory / "corpus").mkdir()
    for number in range(100):
        text = f"def function_{number}(value):\n    return value + {number}\n" * 12
        (directory / "corpus" / f"module_{number}.py").write_text(text)
    train_tokenizer(read_corpus([directory / "corpus"]), directory / "target", vocab_size=300)
    train_tokenizer(read_corpus([directory / "corpus"]), directory / "start", vocab_size=300)
    for name, seed, size in (("target", 0, 300), ("start", 1, 300), ("foreign", 2, 290)):
        small(seed, size).save_pretrained(directory / name)
    return directory


def test_the_recipe_runs_end_to_end(workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance_report, "EVALUATION_ROWS", 8)
    monkeypatch.setattr(boost, "EVALUATION_BATCHES", 1)
    monkeypatch.setattr(boost, "SampleShape", lambda rows: SampleShape(rows, 4, 12, 20))
    monkeypatch.setattr(drafter_checkpoint, "compiled_ways", list)
    recipe = BoostRecipe(steps=4, rows=4, sample_rows=8, corpus_rows=8)

    def train(start: str, settings: BoostRecipe) -> None:
        boost.train_boost([workshop / "corpus"], workshop / "target", workshop / start, tmp_path / "out", 2, settings)

    train("start", recipe)
    trees = []
    kinds = {"small-lm": workshop / "start", **{kind: tmp_path / "out" / kind for kind in ("boost-1", "boost-2")}}
    for kind, model in kinds.items():
        drafter = load_drafter(
            DrafterConfig(model=str(model), drafter_kind=kind, device="cpu", draft_min_probability=0.0)
        )
        assert drafter.info.kind == kind
        trees.append(drafter.open([1, 2, 3], SamplingParams(temperature=0.7, seed=1)).draft(12))
        assert trees[-1].source_names == (kind,)
        assert len(trees[-1]) == 12
        # What it was trained on, or what it has positions for where nobody says.
        assert load_calibration(str(model)).context == (0 if kind == "small-lm" else 32)
    # After four steps boost-1 may miss what the start misses; then boost-2 is trained on the same and is the same.
    assert trees[0].log_probs not in (trees[1].log_probs, trees[2].log_probs)
    card = (tmp_path / "out" / "boost-2" / "README.md").read_text()
    for fact in ("`small-lm`, `boost-1`\nmiss", "| small-lm | + boost-1 | + boost-2 |", "k=4", "| steps | 4 |"):
        assert fact in card
    assert json.loads((tmp_path / "out" / "boost-2" / "recipe.json").read_text())["recipe"]["number"] == 2
    with pytest.raises(ForeignStateError, match="other settings"):
        train("start", replace(recipe, steps=5))
    with pytest.raises(ForeignStateError, match="another start "):
        train("target", recipe)
    # Each of the models has a state besides.
    shutil.rmtree(tmp_path / "out" / "boost.state")
    with pytest.raises(ForeignStateError, match=r"boost-1\.state was made from another start "):
        train("target", recipe)
    with pytest.raises(IncompatibleError, match="290 tokens"):
        train("foreign", recipe)
