"""Strict mode is tried on the machine that promises it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from coppice.core.errors import IncompatibleError
from tests.unit.verifier_svc.conftest import FAMILIES, VOCAB
from verifier_svc.kernels.cpu.attention import CompiledKernel
from verifier_svc.kernels.cpu.packed_layers import pack_linears
from verifier_svc.model import loading
from verifier_svc.model.exactness_probe import rows_stand_alone
from verifier_svc.model.target_model import TargetModel


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_stand_alone_and_every_block_comes_back(family: str, new_model: Callable[[str], PreTrainedModel]) -> None:
    model = new_model(family)
    pack_linears(model)
    target = TargetModel(model, exact=True, num_blocks=8, kernel=CompiledKernel())
    assert rows_stand_alone(target, VOCAB)
    assert target.cache.num_free_blocks == 8


@pytest.mark.parametrize("least", [8, 20, 60], ids="from {} rows on".format)
def test_a_kernel_that_treats_many_rows_differently_is_found_out(
    least: int, new_model: Callable[[str], PreTrainedModel]
) -> None:
    model = new_model("llama")
    target = TargetModel(model, exact=True, num_blocks=8, kernel=CompiledKernel())

    def other_bits(_module: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + 1e-6) if output.shape[1] >= least else output

    model.model.layers[0].mlp.register_forward_hook(other_bits)
    assert not rows_stand_alone(target, VOCAB)


def test_a_kernel_that_treats_the_end_of_a_pass_differently_is_found_out(
    new_model: Callable[[str], PreTrainedModel],
) -> None:
    """As vector code does with what is left over of whole vectors: here in every other size of pass."""
    model = new_model("llama")
    target = TargetModel(model, exact=True, num_blocks=8, kernel=CompiledKernel())

    def other_bits(_module: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        if output.shape[1] % 8:
            output[:, -1] *= 1 + 1e-6
        return output

    model.model.layers[0].mlp.register_forward_hook(other_bits)
    assert not rows_stand_alone(target, VOCAB)


@pytest.fixture
def target(new_model: Callable[[str], PreTrainedModel]) -> TargetModel:
    model = new_model("llama")
    pack_linears(model)
    return TargetModel(model, exact=True, num_blocks=8)


def test_without_it_the_server_is_fast_and_says_so_unless_strict_is_required(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert loading.is_exact(target, VOCAB, is_required=True)
    monkeypatch.setattr(loading, "rows_stand_alone", lambda *_: False)
    assert not loading.is_exact(target, VOCAB, is_required=False)
    assert "strict mode is not offered" in caplog.text
    with pytest.raises(IncompatibleError, match="EXACTNESS is strict"):
        loading.is_exact(target, VOCAB, is_required=True)
