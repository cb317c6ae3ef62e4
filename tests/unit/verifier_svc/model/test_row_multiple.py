"""Passes are multiples of as few rows as keep every row's bits here, and of more where a kernel needs it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.unit.verifier_svc.conftest import VOCAB
from tests.unit.verifier_svc.tiny_engine import tiny_target, tiny_target_with_panels
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import ROW_MULTIPLE, SequenceRows, padded_size
from verifier_svc.kernels.cpu.packed_layers import PackedLinear
from verifier_svc.model.exactness_probe import rows_stand_alone
from verifier_svc.model.row_multiple import packs_all_products, refine_row_multiple
from verifier_svc.model.target_model import TargetModel

NewModel = Callable[[str], PreTrainedModel]


@pytest.fixture
def target(new_model: NewModel) -> TargetModel:
    return tiny_target(new_model("llama"))


def last_logits(target: TargetModel, tokens: list[int]) -> Tensor:
    cache = SequenceCache(target.cache, 64)
    logits = target.forward(target.plan([SequenceRows(cache, tokens)]))[0].clone()
    cache.release()
    return logits


@pytest.mark.parametrize(("new_target", "multiples"), [(tiny_target, (1, 2)), (tiny_target_with_panels, (1,))])
def test_bits_are_those_of_coarser_passes(
    new_target: Callable[[PreTrainedModel], TargetModel], multiples: tuple[int, ...], new_model: NewModel
) -> None:
    """Products from panels are the same for one row, too; those of oneDNN may be."""
    target = new_target(new_model("llama"))
    texts = [list(range(1, 1 + length)) for length in range(1, 20)]
    coarse = [last_logits(target, text) for text in texts]
    assert target.row_multiple == ROW_MULTIPLE
    refine_row_multiple(target, VOCAB)
    assert target.row_multiple in multiples
    assert padded_size(1, target.row_multiple) <= 2
    assert all(torch.equal(last_logits(target, text), known) for text, known in zip(texts, coarse, strict=True))
    assert target.cache.num_free_blocks == target.cache.num_blocks


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "opt"])
def test_families_whose_products_are_packed(family: str, new_model: NewModel) -> None:
    target = tiny_target(new_model(family))
    assert packs_all_products(target.model)
    refine_row_multiple(target, VOCAB)
    assert rows_stand_alone(target, VOCAB), "whatever was found, it keeps the promise"


def test_a_model_with_other_products_is_left_as_it_is(new_model: NewModel) -> None:
    """GPT-2's are no linear layers to PyTorch; nor are a model's that nobody packed."""
    for target in (tiny_target(new_model("gpt2")), TargetModel(new_model("llama"), exact=True, num_blocks=60)):
        assert not packs_all_products(target.model)
        refine_row_multiple(target, VOCAB)
        assert target.row_multiple == ROW_MULTIPLE


@pytest.mark.parametrize("size", [2, 6, 14, 62])
def test_a_product_of_a_few_rows_that_differs_is_found(
    size: int, target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = PackedLinear.forward

    def other_bits(self: PackedLinear, rows: Tensor) -> Tensor:
        result = forward(self, rows)
        return result * (1 + 1e-6) if rows.shape[-2] == size and self.out_features == VOCAB else result

    monkeypatch.setattr(PackedLinear, "forward", other_bits)
    refine_row_multiple(target, VOCAB)
    assert target.row_multiple == ROW_MULTIPLE


@pytest.mark.parametrize("size", [2, 6, 10, 14])
def test_a_pass_of_a_few_rows_that_differs_elsewhere_is_found(size: int, target: TargetModel) -> None:
    """Not in a product: only whole passes of that size show it."""

    def other_bits(_module: object, _inputs: object, output: Tensor) -> Tensor:
        return output * (1 + 1e-6) if output.shape[1] == size else output

    target.model.model.layers[0].mlp.register_forward_hook(other_bits)
    refine_row_multiple(target, VOCAB)
    assert target.row_multiple == ROW_MULTIPLE
