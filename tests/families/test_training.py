"""Additions to models with recurrent layers are trained, and served in strict mode."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from coppice.core.errors import IncompatibleError
from coppice.training.run import load_target
from tests.families.checkpoints import EACH_RECURRENCE, FAMILIES, VOCAB
from verifier_svc.config import VerifierConfig
from verifier_svc.extras.pruning.head import load_head
from verifier_svc.extras.pruning.layers import decoder_layers
from verifier_svc.model.loading import load_probed_target
from verifier_svc.model.output_layer import output_layer
from verifier_svc.training.early_exit import (
    EarlyExitRecipe,
    FrozenTarget,
    HeadModule,
    final_norm,
    self_normalised_loss,
    train_early_exit,
)
from verifier_svc.training.space import SpaceRecipe, train_space

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


def test_an_adapter_is_not_trained_through_recurrent_layers(corpus: Path, tmp_path: Path) -> None:
    write_model("qwen3.5", tmp_path / "model")
    with pytest.raises(IncompatibleError, match="has recurrent layers: groups of masks would need a state each"):
        train_space([corpus], tmp_path / "model", tmp_path / "adapter", SpaceRecipe(steps=1))
