"""What products of matrices leave in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from tests.allocations import allocated_mib
from tests.unit.verifier_svc.tiny_engine import tiny_engine
from verifier_svc.engine.pass_plan import ROW_MULTIPLE, padded_size, padded_sizes
from verifier_svc.kernels.cpu.packed_layers import PackedLinear, pack_linears, packed_layers

MAX_MIB = 1.0
SIZES = padded_sizes(256, ROW_MULTIPLE)


def test_a_pass_with_as_many_rows_as_an_earlier_one_leaves_nothing() -> None:
    """Machine code is kept for every size, once: memory grows with the sizes that passes have had, not with passes."""
    model = nn.Sequential(nn.Linear(64, 32))
    pack_linears(model)
    linear = model[0]
    assert isinstance(linear, PackedLinear)
    with torch.inference_mode():
        for count in SIZES:
            linear(torch.zeros(count, 64))
        before = allocated_mib()
        for count in (*SIZES, *SIZES):
            linear(torch.zeros(count, 64))
    assert allocated_mib() - before < MAX_MIB


def test_sizes_get_coarser_with_a_pass_and_padding_stays_small() -> None:
    for rows in range(1, 2000):
        size = padded_size(rows, ROW_MULTIPLE)
        assert size % ROW_MULTIPLE == 0
        assert 0 <= size - rows < max(ROW_MULTIPLE, rows / 16)
    sizes = {padded_size(rows, ROW_MULTIPLE) for rows in range(1, 2049)}
    assert padded_sizes(2048, ROW_MULTIPLE) == sorted(sizes)
    assert len(sizes) == 32 + 4 * 16


def test_what_was_met_while_loading_leaves_nothing_later(new_model: Callable[[str], PreTrainedModel]) -> None:
    """The loader meets sizes with one product for each shape of weights; passes then find their code there."""
    target = tiny_engine(new_model("llama"))._target
    assert target.prepare_sizes(256, limit_s=60.0) == len(SIZES)
    layers = packed_layers(target.model)
    assert len(layers) > 10
    before = allocated_mib()
    with torch.inference_mode():
        for count in SIZES:
            for layer in layers:
                layer(torch.zeros(count, layer.in_features))
    assert allocated_mib() - before < MAX_MIB


def test_a_large_model_s_sizes_are_not_all_met_while_loading(new_model: Callable[[str], PreTrainedModel]) -> None:
    target = tiny_engine(new_model("llama"))._target
    assert target.prepare_sizes(256, limit_s=0.0) <= 1
