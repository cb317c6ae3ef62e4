"""Adapters and heads say for which target they were trained."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from coppice.checkpoints.bundled import MODELS
from verifier_svc.kernels.cpu.packed_layers import pack_linears
from verifier_svc.model.made_for import FILE, is_made_for, weights_digest, write_target

NewModel = Callable[[str], PreTrainedModel]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_target_is_known_again_packed_or_in_another_precision(
    family: str, new_model: NewModel, tmp_path: Path
) -> None:
    model = new_model(family).to(torch.bfloat16)
    write_target(tmp_path, model)
    assert is_made_for(tmp_path, copy.deepcopy(model).float())
    packed = copy.deepcopy(model).float()
    pack_linears(packed)
    assert is_made_for(tmp_path, packed)


def test_another_target_is_warned_of(new_model: NewModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = new_model("llama")
    write_target(tmp_path, model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    with caplog.at_level(logging.WARNING):
        assert not is_made_for(tmp_path, other)
    assert "was trained for another target" in caplog.text
    assert not is_made_for(tmp_path, new_model("gpt2"))


def test_what_says_nothing_is_taken_as_it_is(
    new_model: NewModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = new_model("llama")
    assert is_made_for(tmp_path, model)
    assert not caplog.records
    (tmp_path / FILE).write_text("[")
    assert is_made_for(tmp_path, model)
    assert "does not say for which target" in caplog.text


@pytest.mark.parametrize("name", ["space", "early-head"])
def test_what_is_bundled_was_trained_for_the_bundled_target(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    assert (MODELS / name / FILE).is_file()
    assert is_made_for(MODELS / name, model)
    assert len(weights_digest(model)) == 64
