"""The recipe of feature-conditioned drafters: states, steps against plain algebra, and tiny runs that resume."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from coppice.core.errors import IncompatibleError
from coppice.core.sampling import SamplingParams
from coppice.training import acceptance_report
from coppice.training.block_layout import BlockLayout
from coppice.training.corpus import read_corpus
from coppice.training.state import ForeignStateError
from coppice.training.target_samples import SampleShape
from coppice.training.teacher import TaughtRows, committed_states, states_of, teach
from coppice.training.tokenizer import train_tokenizer
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.block.block_lm import BlockLm
from drafter_svc.drafters.features.checkpoint import load_conditioning
from drafter_svc.drafters.registry import load_drafter
from drafter_svc.model import checkpoint as drafter_checkpoint
from drafter_svc.training import head_fit, semi_ar_features
from drafter_svc.training.head_fit import HeadSums, best_shares
from drafter_svc.training.head_run import FeatureRecipe, HeadRun
from drafter_svc.training.semi_ar_features import train_semi_ar_features
from drafter_svc.training.trunk import load_trunk
from tests.feature_drafters import KIND, encode
from tests.tiny_blocks import BLOCK, write_tiny_block_drafter
from tests.tiny_checkpoint import ONE_LAYER, tiny_llama

VOCAB = 300
HIDDEN = 16


@pytest.fixture(autouse=True)
def quiet_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, and no compiler: tests check results, not speed."""
    torch.set_num_threads(1)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(drafter_checkpoint, "compiled_ways", list)


def small_llama(seed: int = 0, vocab: int = VOCAB) -> LlamaForCausalLM:
    parts = {"initializer_range": 0.4, "tie_word_embeddings": True, **ONE_LAYER}
    return tiny_llama(vocab_size=vocab, max_context_tokens=256, seed=seed, **parts)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, a target, and a token-only drafter that is none too good."""
    directory = tmp_path_factory.mktemp("workshop")
    corpus = directory / "corpus"
    corpus.mkdir()
    for number in range(100):
        lines = f"def function_{number}(value):\n    return value + {number}\n" * 12
        (corpus / f"module_{number}.py").write_text(lines)
    train_tokenizer(read_corpus([corpus]), directory / "target", vocab_size=VOCAB)
    small_llama().save_pretrained(directory / "target")
    (directory / "stranger").mkdir()
    (directory / "stranger" / "tokenizer.json").write_text("{}")
    small_llama(vocab=VOCAB - 1).save_pretrained(directory / "stranger")
    write_tiny_block_drafter(directory / "trunk", directory / "target", "semi-ar", noise=0.05)
    write_tiny_block_drafter(directory / "other", directory / "stranger", "semi-ar")
    return directory


def text(rows: int, length: int) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))


def test_states_are_the_models_own_and_come_with_the_targets_look_at_the_text(tmp_path: Path) -> None:
    model, rows = small_llama(), text(70, 9)
    with torch.inference_mode():
        expected = model.model(rows).last_hidden_state.bfloat16()
    assert torch.equal(states_of(model, rows), expected)
    assert not model.get_output_embeddings()._forward_pre_hooks
    taught = teach(model, rows, tmp_path / "with", with_states=True)
    assert taught.states is not None
    assert torch.equal(taught.states, expected)
    # From the files, as a resumed run has it.
    again = teach(model, rows, tmp_path / "with", with_states=True)
    assert again.states is not None
    assert torch.equal(again.states, expected)
    plain = teach(model, rows, tmp_path / "without")
    assert plain.states is None
    assert torch.equal(plain.top_ids, taught.top_ids)
    assert plain.batch(3, 0, 0).states is None
    assert taught.batch(3, 0, 0).states.shape == (3, 9, HIDDEN)


def test_a_token_has_the_state_that_it_was_drawn_from_and_prompts_have_none() -> None:
    states = torch.arange(1, 6.0)[None, :, None]
    assert committed_states(states, 0).flatten().tolist() == [0, 1, 2, 3, 4]
    assert committed_states(states, 3).flatten().tolist() == [0, 0, 0, 3, 4]


def random_sums(generator: torch.Generator, table: Tensor) -> tuple[HeadSums, Tensor, Tensor, Tensor]:
    """Sums of rows of 3 places, 4 inputs and 5 numbers, and what they are sums of."""
    inputs, slopes = torch.randn(50, 4, generator=generator), torch.randn(50, 3, 5, generator=generator)
    probabilities = (torch.randn(50, 3, len(table), generator=generator) * 2).softmax(-1)
    sums = HeadSums(3, 4, 5)
    for part in (slice(0, 20), slice(20, 50)):
        sums.add(inputs[part], slopes[part])
        sums.add_curvature(probabilities[part], table)
    return sums, inputs, slopes, probabilities


def curvatures(probabilities: Tensor, table: Tensor) -> Tensor:
    """The oracle: the mean over rows of the covariance of the output layer's rows, row by row."""
    found = torch.zeros(3, 5, 5)
    for row in probabilities:
        for place, own in enumerate(row):
            centred = table - own @ table
            found[place] += (centred * own[:, None]).T @ centred / len(probabilities)
    return found


def test_a_step_solves_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """curvature x step x moments = mean slope, for each place."""
    monkeypatch.setattr(head_fit, "_MOMENT_RIDGE", 0.0)
    monkeypatch.setattr(head_fit, "_CURVATURE_RIDGE", 0.0)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(11, 5, generator=generator)
    sums, inputs, slopes, probabilities = random_sums(generator, table)
    moments = inputs.T @ inputs / 50
    mean = torch.einsum("nph,nd->phd", slopes, inputs) / 50
    for place, (step, curvature) in enumerate(zip(sums.step(), curvatures(probabilities, table), strict=True)):
        assert torch.allclose(curvature @ step @ moments, mean[place], atol=1e-3)
    other = HeadSums(3, 4, 5)
    other.restore(sums.state())
    assert torch.equal(other.step(), sums.step())


def test_heads_of_less_rank_are_the_closest_that_there_are() -> None:
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(11, 5, generator=generator)
    sums, inputs, _, probabilities = random_sums(generator, table)
    heads = torch.randn(3, 5, 4, generator=generator)
    down, up = sums.reduced(heads, 4)
    assert (down.shape, up.shape) == ((4, 4), (3, 5, 4))
    assert torch.allclose(up @ down, heads, atol=1e-3)

    def distance(found: Tensor) -> float:
        """What the difference changes in the scores, by the sums' own curvature."""
        changes = torch.einsum("phd,nd->nph", found - heads, inputs)
        return float(torch.einsum("nph,phk,npk->", changes, curvatures(probabilities, table), changes))

    down, up = sums.reduced(heads, 2)
    assert down.shape == (2, 4)
    best = distance(up @ down)
    for _ in range(20):
        moved = (
            up + 0.05 * torch.randn(up.shape, generator=generator),
            down + 0.05 * torch.randn(down.shape, generator=generator),
        )
        # But for the ridges, which are small.
        assert distance(moved[0] @ moved[1]) > 0.98 * best


def test_each_place_goes_as_far_as_lowers_its_own_loss() -> None:
    def losses(share: float) -> Tensor:
        return torch.tensor([(share - 0.5) ** 2, share, -share])

    shares, found = best_shares(losses, losses(0.0))
    assert shares.tolist() == [0.5, 0.0, 1.0]
    assert found.tolist() == [0.0, 0.0, -1.0]


def test_fitting_finds_what_states_say_of_the_next_token(workshop: Path, tmp_path: Path) -> None:
    """A target that says, whatever the text, what its state points at: the trunk cannot know, and heads can."""
    trunk = load_trunk(workshop / "trunk", VOCAB)
    generator = torch.Generator().manual_seed(0)
    rows = text(96, 24)
    chosen = torch.randint(4, rows.shape, generator=generator)
    directions = torch.randn(4, HIDDEN, generator=generator)
    # The state that token t was drawn from tells what stands at t + 1.
    states = directions[chosen].bfloat16()
    nexts = torch.cat([chosen[:, :1], chosen[:, :-1]], 1) * 7
    top_ids = torch.stack([nexts, nexts + 1], -1)
    taught = TaughtRows(rows, top_ids.int(), torch.tensor([0.9, 0.1]).log().expand(96, 24, 2), states)
    run = HeadRun(trunk, taught, FeatureRecipe(3, rows=6, groups=8), tmp_path)
    run.run(lambda _: 0.0)
    losses = [entry["train"] for entry in run.curve]
    assert losses[-1] < losses[0] - 1
    assert losses == sorted(losses, reverse=True)
    assert (tmp_path / "heads.pt").is_file()


def train(workshop: Path, out: Path, monkeypatch: pytest.MonkeyPatch, trunk: str = "trunk") -> None:
    monkeypatch.setattr(acceptance_report, "EVALUATION_ROWS", 8)
    monkeypatch.setattr(semi_ar_features, "EVALUATION_BATCHES", 1)
    monkeypatch.setattr(semi_ar_features, "SampleShape", lambda rows: SampleShape(rows, 4, 12, 20))
    recipe = FeatureRecipe(steps=2, rows=4, sample_rows=16, corpus_rows=16, groups=8, rank=6)
    train_semi_ar_features([workshop / "corpus"], workshop / "target", workshop / trunk, out, recipe)


def test_the_recipe_runs_to_a_checkpoint_that_drafts_as_it_was_fitted(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    train(workshop, out, monkeypatch)
    assert {path.name for path in out.iterdir()} == {
        "README.md", "drafter.json", "features.safetensors", "recipe.json", "validation_curve.png"
    }  # fmt: skip
    drafter = load_drafter(DrafterConfig(model=str(out), drafter_kind=KIND, device="cpu", draft_min_probability=0.0))
    assert isinstance(drafter, BlockLm)
    assert (drafter.info.kind, drafter.info.vocab_size, drafter.info.feature_size) == (KIND, VOCAB, HIDDEN)
    card = (out / "README.md").read_text()
    for fact in (KIND, "With states", "`trunk` alone", "bits per byte", "32 bytes per token", "| steps | 2 |"):
        assert fact in card, fact
    curve = json.loads((out / "recipe.json").read_text())["curve"]
    assert [entry["step"] for entry in curve] == [0, 1, 2]
    # What is served says what was measured: scores of the heads on the trunk's rows, but for 8 bits.
    matrices = load_conditioning(str(out)).matrices
    trunk = load_trunk(workshop / "trunk", VOCAB)
    # Numbers that bfloat16 has.
    tokens, state = text(1, 12), text(1, HIDDEN).float() % 100
    layout = BlockLayout(12, torch.tensor([10]), BLOCK - 1, False)
    features = torch.zeros(1, 12, HIDDEN)
    down = torch.from_numpy(np.concatenate([matrices["of_feature"], matrices["of_token"]], 1))
    features[0, 10] = state
    said = torch.einsum(
        "phd,rgd->rgph", torch.from_numpy(matrices["up"]) @ down, trunk.inputs(layout, tokens, features)
    )
    sequence = drafter.open(tokens[0, :9].tolist(), SamplingParams())
    sequence.extend(tokens[0, 9:11].tolist(), encode([state[0].tolist()]))
    assert np.allclose(sequence._head_rows, said[0, 0], atol=1e-4)


def test_checkpoints_that_make_no_sense_are_refused(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    train(workshop, out, monkeypatch)
    config = DrafterConfig(model=str(out), drafter_kind=KIND, device="cpu")
    described = json.loads((out / "drafter.json").read_text())
    for change, message in (
        ({"trunk": None}, "does not say which"),
        ({"trunk": {**described["trunk"], "path": str(workshop / "other")}}, "other layers"),
        ({"trunk": {**described["trunk"], "path": str(workshop)}}, "has neither"),
        ({"num_masks": 2}, "5 heads, and 2 masks"),
        ({"kind": "semi-ar"}, "not 'semi-ar-features'"),
    ):
        (out / "drafter.json").write_text(json.dumps({**described, **change}))
        with pytest.raises(IncompatibleError, match=message):
            load_drafter(config)
    (out / "drafter.json").write_text(json.dumps(described))
    whole = (out / "features.safetensors").read_bytes()
    (out / "features.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(IncompatibleError, match=r"features\.safetensors"):
        load_drafter(config)
    (out / "features.safetensors").unlink()
    with pytest.raises(IncompatibleError, match=r"features\.safetensors"):
        load_drafter(config)
    with pytest.raises(IncompatibleError, match="299 tokens and the target 300"):
        train(workshop, tmp_path / "strange", monkeypatch, trunk="other")


class KilledError(Exception):
    """Stands for whatever kills a run."""


def test_a_resumed_training_equals_an_uninterrupted_one(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(workshop, tmp_path / "whole", monkeypatch)
    with pytest.MonkeyPatch.context() as patch:
        original = HeadRun._sums

        def sums(self: HeadRun, step: int) -> HeadSums:
            if step == 2:
                raise KilledError
            return original(self, step)

        patch.setattr(HeadRun, "_sums", sums)
        with pytest.raises(KilledError):
            train(workshop, tmp_path / "killed", monkeypatch)
    train(workshop, tmp_path / "killed", monkeypatch)
    for name in ("features.safetensors", "drafter.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    write_tiny_block_drafter(tmp_path / "later", workshop / "target", "semi-ar", noise=0.06)
    with pytest.raises(ForeignStateError, match="another trunk "):
        train(workshop, tmp_path / "killed", monkeypatch, trunk=str(tmp_path / "later"))
