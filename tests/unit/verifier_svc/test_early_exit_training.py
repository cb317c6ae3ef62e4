"""The recipe of early heads: its loss, its calibration, what it starts from, and a tiny full run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from coppice.core.errors import IncompatibleError
from coppice.training.corpus import read_corpus
from coppice.training.state import ForeignStateError
from coppice.training.tokenizer import train_tokenizer
from tests.tiny_checkpoint import tiny_llama
from tests.unit.verifier_svc.conftest import FAMILIES
from verifier_svc.extras.pruning.head import EarlyHead, load_head, save_head
from verifier_svc.extras.pruning.probe import check_pruning
from verifier_svc.kernels.cpu.packed_layers import pack_linears
from verifier_svc.model.output_layer import output_layer
from verifier_svc.model.target_model import TargetModel
from verifier_svc.training import early_exit
from verifier_svc.training.early_exit import (
    EarlyExitRecipe,
    FrozenTarget,
    HeadModule,
    Values,
    calibrate,
    collect,
    final_norm,
    measure,
    self_normalised_loss,
    train_early_exit,
)

NewModel = Callable[[str], PreTrainedModel]
RECIPE = EarlyExitRecipe(layer=1, rank=4, steps=30, rows=4, length=32, learning_rate=0.02, held_out_windows=16)


def test_the_loss_is_least_where_scores_are_the_targets_log_probabilities() -> None:
    logits = torch.randn(3, 7, 50, generator=torch.Generator().manual_seed(0))
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean().item()
    least = self_normalised_loss(log_probs, logits, 0.1).item()
    assert least == pytest.approx(entropy, abs=1e-5)
    # The same distribution, not normalised by itself.
    assert self_normalised_loss(log_probs + 2, logits, 0.1).item() == pytest.approx(entropy + 0.4, abs=1e-4)
    assert self_normalised_loss(log_probs.flip(-1), logits, 0.1).item() > least + 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_begins_as_the_targets_own_last_norm(family: str, new_model: NewModel) -> None:
    """Behind the last layer, it would say what the target says."""
    model = new_model(family)
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    seen: list[torch.Tensor] = []

    def keep(_module: object, inputs: tuple[torch.Tensor, ...]) -> None:
        seen.append(inputs[0])

    norms = [module for module in model.base_model.modules() if type(module).__name__.endswith("Norm")]
    last = {"opt": "final_layer_norm", "gpt2": "ln_f", "gpt_neox": "final_layer_norm"}.get(family, "norm")
    owner = model.base_model.decoder if family == "opt" else model.base_model
    getattr(owner, last).register_forward_pre_hook(keep)
    assert getattr(owner, last) in norms
    with torch.inference_mode():
        expected = model(input_ids=torch.arange(9)[None], use_cache=False).logits
        head = HeadModule(final_norm(model), 4, seed=0)
        assert torch.allclose(output_layer(model).all_scores(head(seen[0])), expected, atol=1e-3)


def test_the_target_is_frozen_and_looked_at_in_one_forward(new_model: NewModel) -> None:
    model = new_model("llama")
    target = FrozenTarget(model, 1)
    ids = torch.arange(12).reshape(2, 6)
    hidden, logits = target.look(ids)
    with torch.inference_mode():
        output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    assert torch.equal(hidden, output.hidden_states[1])
    assert torch.equal(logits, output.logits)
    assert not logits.requires_grad
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(IncompatibleError, match="after layer 2"):
        FrozenTarget(new_model("llama"), 2)


def test_thresholds_keep_the_recall_that_they_are_calibrated_for() -> None:
    values = {1.0: Values(torch.arange(1000.0).flip(0), torch.tensor([[1.0, 4.0, 990.0]]))}
    [threshold] = calibrate(values, 0.995)
    assert (threshold.score, threshold.recall) == (5.0, 0.995)
    [measured] = measure(values, (threshold,))
    assert measured.recall == pytest.approx(0.995)
    assert measured.removed == pytest.approx(2 / 3)


def test_values_are_those_of_the_drawn_token_with_its_noise() -> None:
    generator = torch.Generator().manual_seed(1)
    scores, logits = (torch.randn(2000, 20, generator=generator) for _ in range(2))
    values = collect([(scores, logits)], seed=3)
    assert torch.equal(values[0.0].drawn, scores.gather(1, logits.argmax(1, keepdim=True))[:, 0])
    assert values[0.0].others.shape == (2000, 3)
    again, other = collect([(scores, logits)], seed=3), collect([(scores, logits)], seed=4)
    assert torch.equal(values[1.0].drawn, again[1.0].drawn)
    assert not torch.equal(values[1.0].drawn, other[1.0].drawn)
    # Of the target's own scores, those of drawn tokens with their noise are Gumbel numbers.
    own = collect([(logits.log_softmax(-1), logits)], seed=3)[1.0].drawn
    assert own.mean().item() == pytest.approx(0.5772, abs=0.1)
    assert own.std().item() == pytest.approx(1.2825, abs=0.1)


def test_a_tiny_run_writes_a_head_that_the_target_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrated: list[EarlyHead] = []

    def save_and_keep(head: EarlyHead, directory: Path) -> None:
        calibrated.append(head)
        save_head(head, directory)

    monkeypatch.setattr(early_exit, "save_head", save_and_keep)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(100):
        text = f"def function_{number}(value):\n    return value + {number}\n" * 12
        (corpus / f"module_{number}.py").write_text(text)
    train_tokenizer(read_corpus([corpus]), tmp_path / "target", vocab_size=300)
    tiny_llama(vocab_size=300, max_context_tokens=64).save_pretrained(tmp_path / "target")
    out = tmp_path / "head"
    train_early_exit([corpus], tmp_path / "target", out, RECIPE)
    record = json.loads((out / "recipe.json").read_text())
    curve = [entry["held_out"] for entry in record["curve"]]
    assert record["curve"][-1]["step"] == RECIPE.steps
    card = (out / "README.md").read_text()
    assert re.findall(r"^\| (\S+) \| -?\d+\.\d+ \| [01]\.\d+ \| [01]\.\d+ \|$", card, re.MULTILINE) == ["0", "0.7", "1"]
    assert f"{curve[-1]:.4f} nats per token" in card
    head = load_head(out)
    assert all(threshold.recall >= RECIPE.recall for threshold in head.thresholds)
    # Thresholds are those of the head as it is kept, in bfloat16.
    [before_saving] = calibrated
    assert head.low_rank is not None
    assert before_saving.low_rank is not None
    assert torch.equal(head.low_rank.up, before_saving.low_rank.up)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32).eval()
    before = held_out_loss(model, HeadModule(final_norm(model), RECIPE.rank, RECIPE.seed).head(1, head.thresholds))
    assert held_out_loss(model, head) < before
    pack_linears(model)
    target = TargetModel(model, exact=True, num_blocks=16)
    target.install_head(head)
    check_pruning(target, 300, exact=True)
    with pytest.raises(ForeignStateError):
        train_early_exit([corpus], tmp_path / "target", out, replace(RECIPE, rank=5))


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, head: EarlyHead) -> float:
    """On tokens at random, which the run has not seen in this order."""
    ids = torch.randint(300, (8, 32), generator=torch.Generator().manual_seed(5))
    hidden, logits = FrozenTarget(model, 1).look(ids)
    scores = output_layer(model).all_scores(head.predict(hidden))
    return self_normalised_loss(scores, logits, RECIPE.normalising).item()
