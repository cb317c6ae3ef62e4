"""Products of bfloat16 pairs: a row has the same bits in any company, by any threads, and at any place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from verifier_svc.kernels.cpu import pair_products
from verifier_svc.kernels.cpu.packed_layers import PackedLinear, pack_linears
from verifier_svc.kernels.cpu.pair_products import PairProduct
from verifier_svc.kernels.cpu.shared_work import SharedThreads
from verifier_svc.model.precision import multiplies_bfloat16

# The first test compiles.
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not multiplies_bfloat16(), reason="the processor does not multiply bfloat16"),
]

# Inputs and outputs: even and odd, whole panels and parts of them, several groups.
SHAPES = [(64, 64), (33, 70), (512, 8), (700, 200)]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def linear(inputs: int, outputs: int, *, biased: bool = False) -> nn.Linear:
    torch.manual_seed(inputs)
    layer = nn.Linear(inputs, outputs, bias=biased).requires_grad_(False)
    layer.weight.copy_(layer.weight.bfloat16())
    return layer


def rows(count: int, inputs: int) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_it_is_the_product_with_rounded_inputs(inputs: int, outputs: int, biased: bool) -> None:
    layer, some = linear(inputs, outputs, biased=biased), rows(120, inputs)
    product = PairProduct(layer, SharedThreads())
    biases = layer.bias.double() if biased else None
    expected = F.linear(some.bfloat16().double(), layer.weight.double(), biases)
    assert torch.allclose(product(some).double(), expected, atol=1e-5)
    assert torch.equal(product(some.view(2, 60, inputs)), product(some).view(2, 60, outputs))


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_row_s_bits_depend_neither_on_others_nor_on_threads(
    inputs: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every piece is a block of rows and one panel, and every product is worth all threads.
    monkeypatch.setattr(pair_products, "_GROUP_BYTES", 1)
    monkeypatch.setattr(pair_products, "_WORTH_BITS", 0)
    layer, some = linear(inputs, outputs, biased=True), rows(150, inputs)
    product = PairProduct(layer, SharedThreads())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = torch.cat([product(some[row : row + 1]) for row in range(len(some))])
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for first, last in ((0, 2), (3, 8), (0, 7), (10, 58), (10, 59), (0, 150)):
            assert torch.equal(product(some[first:last]), alone[first:last])


def test_packed_layers_get_other_products() -> None:
    model = nn.Sequential(linear(64, 64))
    pack_linears(model)
    some = rows(5, 64)
    plain = model(some)
    threads = SharedThreads()
    assert pack_linears(model, lambda layer: PairProduct(layer, threads)) == 1
    layer = model[0]
    assert isinstance(layer, PackedLinear)
    assert isinstance(layer.product, PairProduct)
    assert not torch.equal(model(some), plain), "inputs are rounded"
    assert torch.allclose(model(some), plain, atol=0.02)
