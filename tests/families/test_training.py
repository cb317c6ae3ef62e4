"""Additions to models with recurrent layers are trained, and served in strict mode."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from coppice.core.tree import ROOT
from coppice.training import acceptance_report
from coppice.training.block_layout import BlockLayout
from coppice.training.run import load_target
from coppice.training.target_samples import SampleShape
from tests.families.checkpoints import EACH_RECURRENCE, FAMILIES, VOCAB
from tests.unit.verifier_svc.counting_text import losses_of_counting
from verifier_svc.config import VerifierConfig
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.extras.pruning.head import load_head
from verifier_svc.extras.pruning.layers import decoder_layers
from verifier_svc.extras.redraft.adapter import save_adapter
from verifier_svc.extras.redraft.groups import MaskGroup
from verifier_svc.model.loading import load_probed_target
from verifier_svc.model.output_layer import output_layer
from verifier_svc.training import space
from verifier_svc.training.early_exit import (
    EarlyExitRecipe,
    FrozenTarget,
    HeadModule,
    final_norm,
    self_normalised_loss,
    train_early_exit,
)
from verifier_svc.training.space_masks import SpaceMasks

# The first test compiles.
pytestmark = pytest.mark.timeout(600)

RECIPE = EarlyExitRecipe(layer=1, rank=4, steps=200, rows=4, length=32, learning_rate=0.02, held_out_windows=16)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpus")
    for number in range(100):
        lines = f"def function_{number}(value):\n    return value + {number}\n" * 12
        (directory / f"module_{number}.py").write_text(lines)
    return directory


def write_model(name: str, directory: Path) -> None:
    """A family's checkpoint, with a tokenizer that reads each character of a text."""
    FAMILIES[name].write(directory)
    tokenizer = Tokenizer(models.WordLevel({chr(33 + index): index for index in range(VOCAB)}, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=chr(35)).save_pretrained(directory)


@pytest.mark.parametrize("name", EACH_RECURRENCE)
def test_an_early_head_is_trained_and_served(
    name: str, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(name, tmp_path / "model")
    train_early_exit([corpus], tmp_path / "model", tmp_path / "head", RECIPE)
    _, model = load_target(tmp_path / "model", torch.float32)
    trained = load_head(tmp_path / "head")
    first = HeadModule(final_norm(model), RECIPE.rank, RECIPE.seed).head(RECIPE.layer, trained.thresholds)
    ids = torch.randint(VOCAB, (8, 32), generator=torch.Generator().manual_seed(5))
    hidden, logits = FrozenTarget(model, RECIPE.layer).look(ids)
    losses = [
        self_normalised_loss(output_layer(model).all_scores(head.predict(hidden)), logits, RECIPE.normalising)
        for head in (trained, first)
    ]
    assert losses[0] < 0.9 * losses[1]
    config = VerifierConfig(
        model=str(tmp_path / "model"), device="cpu", exactness="strict", early_head=str(tmp_path / "head")
    )
    with caplog.at_level(logging.WARNING):
        _, info = load_probed_target(config)
    assert info.pruning is not None
    assert "trained for another target" not in caplog.text


@pytest.mark.parametrize("name", EACH_RECURRENCE)
def test_a_head_begins_as_the_targets_own_last_norm(name: str, tmp_path: Path) -> None:
    """After the last layer, it would say what the target says."""
    FAMILIES[name].write(tmp_path)
    _, model = load_target(tmp_path, torch.float32)
    after_last: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        after_last.append(output[0] if isinstance(output, tuple) else output)

    decoder_layers(model)[-1].register_forward_hook(keep)
    ids = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        scores = output_layer(model).all_scores(HeadModule(final_norm(model), 4, seed=0)(after_last[0]))
    assert torch.allclose(scores, logits, atol=1e-3)


@pytest.mark.parametrize("name", EACH_RECURRENCE)
def test_masks_say_in_service_what_they_said_in_training(name: str, tmp_path: Path) -> None:
    """With gradients, which compiled loops do not have, and without."""
    FAMILIES[name].write(tmp_path / "model")
    _, model = load_target(tmp_path / "model", torch.float32)
    masks = SpaceMasks(model, 3, rank=4, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in [*masks.up, *masks.parameters()]:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            parameter.copy_(parameter.bfloat16().float())
    tokens = torch.randint(VOCAB, (2, 18), generator=torch.Generator().manual_seed(2))
    anchors = (3, 9, 9, 12)
    layout = BlockLayout(18, torch.tensor(anchors), 3, sees_all=False)
    said = masks(tokens, layout)
    said.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in masks.parameters())
    with torch.no_grad():
        assert torch.allclose(masks(tokens, layout), said, atol=1e-3)
        # Outside, layers are those of transformers.
        assert torch.allclose(model(input_ids=tokens, use_cache=False).logits[:, anchors], said[:, :, 0], atol=2e-3)
    save_adapter(masks.adapter(((0.0, (1.0,)),)), tmp_path / "adapter")
    config = VerifierConfig(model=str(tmp_path / "model"), device="cpu", space_adapter=str(tmp_path / "adapter"))
    target, _ = load_probed_target(config)
    for row, text in enumerate(tokens.tolist()):
        for place, anchor in enumerate(anchors):
            cache = SequenceCache(target.cache, 64)
            rows = SequenceRows(cache, text[: anchor + 1], masks=(MaskGroup(ROOT, 3),))
            logits = target.forward(target.plan([rows]))[:4]
            assert torch.allclose(logits, said[row, place], atol=3e-3), (row, anchor)
            cache.release()


@pytest.mark.parametrize("name", EACH_RECURRENCE)
def test_masks_of_a_frozen_target_learn(name: str, tmp_path: Path) -> None:
    """Text that counts in a circle."""
    FAMILIES[name].write(tmp_path)
    _, model = load_target(tmp_path, torch.float32)
    masks = SpaceMasks(model, 2, rank=8, seed=0)
    losses = losses_of_counting(masks, 40, 4)
    assert losses[-1] < 0.5 * losses[0]


def test_an_adapter_is_trained_and_served(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With attention, recurrences and experts."""
    # No compiler, whose imports warn.
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(acceptance_report, "EVALUATION_ROWS", 8)
    monkeypatch.setattr(space, "EVALUATION_BATCHES", 1)
    monkeypatch.setattr(space, "SampleShape", lambda rows: SampleShape(rows, 4, 12, 20))
    write_model("qwen3-next", tmp_path / "model")
    recipe = space.SpaceRecipe(steps=4, masks=3, rank=2, rows=2, groups=4, sample_rows=8, corpus_rows=8)
    space.train_space([corpus], tmp_path / "model", tmp_path / "adapter", recipe)
    config = VerifierConfig(
        model=str(tmp_path / "model"), device="cpu", exactness="strict", space_adapter=str(tmp_path / "adapter")
    )
    with caplog.at_level(logging.WARNING):
        _, info = load_probed_target(config)
    assert info.redraft is not None
    assert "trained for another target" not in caplog.text
