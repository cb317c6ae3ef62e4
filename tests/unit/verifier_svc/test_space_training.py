"""The recipe of the in-pass adapter: what is trained is what the verifier runs, and a tiny full run that resumes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from typer.testing import CliRunner

from coppice.cli.train import app
from coppice.core.errors import IncompatibleError
from coppice.search.transition_scores import TransitionScores
from coppice.training import acceptance_report, loop
from coppice.training.block_layout import BlockLayout
from coppice.training.corpus import read_corpus
from coppice.training.loop import LoopConfig
from coppice.training.target_samples import SampleShape
from coppice.training.tokenizer import train_tokenizer
from tests.tiny_checkpoint import ONE_LAYER, tiny_llama
from tests.unit.verifier_svc.conftest import FAMILIES, VOCAB
from tests.unit.verifier_svc.counting_text import losses_of_counting
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.extras.redraft.adapter import load_adapter, save_adapter
from verifier_svc.extras.redraft.groups import MaskGroup
from verifier_svc.model.target_model import TargetModel
from verifier_svc.training import space
from verifier_svc.training.space_masks import SpaceMasks

NewModel = Callable[[str], PreTrainedModel]
ROOT = -1


@pytest.fixture(autouse=True)
def quiet_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, and no compiler: tests check results, not speed."""
    torch.set_num_threads(1)
    monkeypatch.setattr("shutil.which", lambda name: None)


def shaken(model: PreTrainedModel, num_masks: int = 3, transition_rank: int = 0) -> SpaceMasks:
    """Masks whose additions do something, in numbers that bfloat16 has."""
    masks = SpaceMasks(model, num_masks, rank=4, seed=0, transition_rank=transition_rank)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for up in masks.up:
            up.copy_(torch.randn(up.shape, generator=generator) * 0.5)
        for parameter in masks.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return masks


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_say_in_service_what_they_said_in_training(family: str, new_model: NewModel, tmp_path: Path) -> None:
    model = new_model(family)
    tokens = torch.randint(VOCAB, (2, 18), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        plain = model(input_ids=tokens).logits
        masks = shaken(model)
        said = masks(tokens, BlockLayout(18, torch.tensor([3, 9, 12]), 3, sees_all=False))
    for place, anchor in enumerate((3, 9, 12)):
        assert torch.allclose(said[:, place, 0], plain[:, anchor], atol=1e-4)
    save_adapter(masks.adapter(((0.0, (1.0,)),)), tmp_path)
    served = new_model(family)
    target = TargetModel(served, exact=True, num_blocks=16)
    target.adapt(load_adapter(tmp_path))
    for row, text in enumerate(tokens.tolist()):
        for place, anchor in enumerate((3, 9, 12)):
            cache = SequenceCache(target.cache, 64)
            rows = SequenceRows(cache, text[: anchor + 1], masks=(MaskGroup(ROOT, 3),))
            logits = target.forward(target.plan([rows]))[:4]
            assert torch.allclose(logits, said[row, place], atol=2e-3), (row, anchor)
            cache.release()


def test_what_the_token_before_adds_is_in_service_what_it_was_in_training(new_model: NewModel, tmp_path: Path) -> None:
    model = new_model("llama")
    tokens = torch.randint(VOCAB, (2, 18), generator=torch.Generator().manual_seed(2))
    layout = BlockLayout(18, torch.tensor([3, 9, 12]), 3, sees_all=False)
    masks = shaken(model, transition_rank=4)
    assert masks.transition is not None
    with torch.no_grad():
        masks.transition.behind.normal_(generator=torch.Generator().manual_seed(3))
        said = masks(tokens, layout)[:, :, 1:]
        transition, masks.transition = masks.transition, None
        without = masks(tokens, layout)[:, :, 1:]
        masks.transition = transition
    save_adapter(masks.adapter(((0.0, (1.0,)),)), tmp_path)
    pair = load_adapter(tmp_path).transition
    assert pair is not None
    maps = [matrix.float().numpy() for matrix in (pair.before, pair.behind)]
    tables = [layer.weight.float().numpy() for layer in (model.get_input_embeddings(), model.get_output_embeddings())]
    scores = TransitionScores.of_embeddings(*maps, *tables)
    assert scores.vocab_size == VOCAB
    before = tokens[:, layout.predicted[:, :-1]]
    tokens_before = before.flatten().tolist()
    zeros, ones = np.zeros((2, VOCAB), np.float32), np.array([1.0, 0.5], np.float32)
    added = torch.from_numpy(scores.behind(tokens_before, zeros, [0] * len(tokens_before), ones)).view_as(said)
    assert (said - without).abs().mean() > 0.1
    # Tables and what they are made from are kept in bfloat16.
    assert (added - (said - without)).abs().max() < 0.05 * (said - without).abs().max()


def test_a_frozen_target_learns_to_say_what_comes_behind_its_next_token() -> None:
    """Text that counts in a circle."""
    model = tiny_llama(vocab_size=64, max_context_tokens=128, seed=0, **{**ONE_LAYER, "initializer_range": 0.2})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    masks = SpaceMasks(model, 2, rank=8, seed=0)
    losses = losses_of_counting(masks, 60, 8)
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_additions_are_put_on_the_layers_that_are_named_alone() -> None:
    model = tiny_llama(vocab_size=64, max_context_tokens=128, seed=0, **ONE_LAYER)
    every = SpaceMasks(model, 2, rank=4, seed=0).adapter(((0.0, (1.0,)),)).low_rank
    named = SpaceMasks(model, 2, rank=4, seed=0, modules=["o_proj", "gate_proj"]).adapter(((0.0, (1.0,)),)).low_rank
    assert set(named) == {name for name in every if name.endswith(("o_proj", "gate_proj"))}
    assert 0 < len(named) < len(every)
    with pytest.raises(IncompatibleError, match="LlamaForCausalLM has no linear layers c_fc"):
        SpaceMasks(model, 2, rank=4, seed=0, modules=["o_proj", "c_fc"])


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny corpus, and a target with its tokenizer."""
    directory = tmp_path_factory.mktemp("workshop")
    corpus = directory / "corpus"
    corpus.mkdir()
    for number in range(100):
        lines = f"def function_{number}(value):\n    return value + {number}\n" * 12
        (corpus / f"module_{number}.py").write_text(lines)
    train_tokenizer(read_corpus([corpus]), directory / "target", vocab_size=300)
    shape: dict[str, Any] = {"initializer_range": 0.4, **ONE_LAYER}
    tiny_llama(vocab_size=300, max_context_tokens=256, seed=0, **shape).save_pretrained(directory / "target")
    return directory


def train(workshop: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance_report, "EVALUATION_ROWS", 8)
    monkeypatch.setattr(space, "EVALUATION_BATCHES", 1)
    monkeypatch.setattr(space, "SampleShape", lambda rows: SampleShape(rows, 4, 12, 20))
    monkeypatch.setattr(loop, "LoopConfig", partial(LoopConfig, evaluate_every=4, save_every_s=0.0))
    recipe = space.SpaceRecipe(steps=8, masks=3, rank=2, rows=2, groups=4, sample_rows=8, corpus_rows=8)
    space.train_space([workshop / "corpus"], workshop / "target", out, recipe)


def test_the_recipe_runs_to_an_adapter_that_says_what_it_is(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(workshop, tmp_path / "out", monkeypatch)
    adapter = load_adapter(tmp_path / "out")
    assert adapter.num_masks == 3
    assert [len(scales) for _, scales in adapter.sigmas] == [3, 3, 3]
    card = (tmp_path / "out" / "README.md").read_text()
    for fact in ("re-draft", "j=4", "| steps | 8 |", "target"):
        assert fact in card
    assert json.loads((tmp_path / "out" / "recipe.json").read_text())["recipe"]["masks"] == 3


class KilledError(Exception):
    """Stands for whatever kills a run."""


def test_a_resumed_training_equals_an_uninterrupted_one(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(workshop, tmp_path / "whole", monkeypatch)
    with pytest.MonkeyPatch.context() as patch:
        original = space.random_layout
        calls = []

        def layout(*arguments: Any) -> BlockLayout:
            calls.append(arguments)
            if len(calls) == 6:
                raise KilledError
            return original(*arguments)

        patch.setattr(space, "random_layout", layout)
        with pytest.raises(KilledError):
            train(workshop, tmp_path / "killed", patch)
    train(workshop, tmp_path / "killed", monkeypatch)
    for name in ("space.safetensors", "space.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_the_command_gets_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(space, "train_space", lambda *arguments: calls.append(arguments))
    sizes = ["--steps", "7", "--samples", "64", "--corpus-rows", "5", "--seed", "3", "--threads", "1"]
    shape = ["--masks", "2", "--rank", "6", "--corpus", str(tmp_path), "--target", "t", "--out", "o"]
    modules = ["--module", "q_proj", "--module", "o_proj"]
    result = CliRunner().invoke(app, ["space", *sizes, *shape, *modules])
    assert result.exit_code == 0, result.output
    recipe = space.SpaceRecipe(7, 2, 6, ("q_proj", "o_proj"), sample_rows=64, corpus_rows=5, seed=3)
    assert calls == [([tmp_path], Path("t"), Path("o"), recipe)]
