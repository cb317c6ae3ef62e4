"""Products of a few rows come from panels where these have oneDNN's bits and are faster; and then it is not noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.unit.verifier_svc.conftest import VOCAB
from tests.unit.verifier_svc.tiny_engine import tiny_target, tiny_target_with_panels
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.kernels.cpu import few_row_products
from verifier_svc.kernels.cpu.few_row_products import PanelProduct, holds_exactly, prefer_panels
from verifier_svc.kernels.cpu.packed_layers import PackedLinear, one_of_each_shape, pack_linears
from verifier_svc.model.exactness_probe import rows_stand_alone

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture
def without_gradients() -> object:
    with torch.inference_mode():
        yield


def layer(inputs: int = 96, outputs: int = 80, *, biased: bool = False, chain: int = 0) -> PackedLinear:
    """`chain`: a library stands in for this machine's whose chains are so long."""
    torch.manual_seed(inputs)
    linear = nn.Linear(inputs, outputs, bias=biased).requires_grad_(False)
    linear.weight.copy_(linear.weight.bfloat16())
    model = nn.Sequential(linear)
    assert pack_linears(model) == 1
    packed = model[0]
    assert isinstance(packed, PackedLinear)
    if chain:
        packed.product = lambda values: PanelProduct(packed, chain)(values)
    return packed


def always(limit: int) -> Callable[..., int]:
    return lambda *_: limit


def rows(count: int, inputs: int = 96) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("inputs", [64, 500, 512, 1152, 2100])
def test_bits_are_those_of_this_machine_s_library_or_it_is_left_alone(inputs: int, biased: bool) -> None:
    one = layer(inputs, 112, biased=biased)
    library = {count: one(rows(count, inputs)) for count in (2, 3, 4, 8, 16, 31, 40)}
    preferred = prefer_panels(nn.Sequential(one), lambda _: None, always(32))
    assert (one._few_rows is not None) == bool(preferred)
    for count, expected in library.items():
        assert torch.equal(one(rows(count, inputs)), expected)


@pytest.mark.parametrize("chain", [2100, 1024, 512])
def test_the_library_s_chains_are_found(chain: int) -> None:
    one = layer(2100, chain=chain)
    assert prefer_panels(nn.Sequential(one), lambda _: None, always(32)) == 1
    assert one._few_rows.chain == chain


@pytest.mark.parametrize("chain", [300, 1])
def test_a_library_with_another_order_is_left_alone(chain: int) -> None:
    assert prefer_panels(nn.Sequential(layer(2100, chain=chain)), lambda _: None, always(32)) == 0


def test_weights_that_have_more_bits_are_left_alone() -> None:
    exact, finer = layer(chain=96), layer(chain=96)
    finer.weight[79, 95] = 1 + 2.0**-10
    assert holds_exactly(exact.weight)
    assert not holds_exactly(finer.weight)
    assert prefer_panels(nn.Sequential(exact, finer), lambda _: None, always(32)) == 1
    assert finer._few_rows is None


def test_layers_that_are_multiplied_in_other_ways_are_tried_by_themselves() -> None:
    """Of one shape, with weights that bfloat16 holds and finer ones."""
    exact, finer, other = layer(chain=96), layer(chain=96), layer(chain=96)
    finer.weight[79, 95] = 1 + 2.0**-10
    model = nn.Sequential(exact, finer, other)
    assert one_of_each_shape(model) == [exact]
    prefer_panels(model, lambda _: None, always(32))
    assert one_of_each_shape(model) == [exact, finer]


def test_the_faster_one_is_taken_for_so_many_rows() -> None:
    calls: list[int] = []
    one = layer(chain=96)

    def counted(values: Tensor) -> Tensor:
        calls.append(len(values))
        return PanelProduct(one, 96)(values)

    one.product = counted
    assert prefer_panels(nn.Sequential(one), lambda _: None, always(5)) == 1
    calls.clear()
    for count in range(1, 9):
        assert torch.equal(one(rows(count)), PanelProduct(one, 96)(rows(count)))
    assert calls == [6, 7, 8]


@pytest.mark.parametrize(("faster_up_to", "limit"), [(0, 0), (1, 1), (12, 12), (1000, 48)])
def test_what_is_faster_is_measured(faster_up_to: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on with every product, by more for slow ones."""
    now_s = 0.0
    sizes: list[int] = []

    def product(seconds: Callable[[int], float]) -> Callable[[Tensor], Tensor]:
        def multiply(values: Tensor) -> Tensor:
            nonlocal now_s
            now_s += seconds(len(values))
            return values

        return multiply

    one = layer()
    monkeypatch.setattr(one, "forward", product(lambda _: 2.0))
    monkeypatch.setattr(few_row_products.time, "perf_counter", lambda: now_s)
    panels = {one: product(lambda count: 1.0 if count <= faster_up_to else 3.0)}
    assert few_row_products._last_faster(panels, sizes.append) == limit
    assert sizes == sorted(set(sizes)), "as many threads as a pass of that size has, each once"


def test_nothing_changes_where_panels_are_slower() -> None:
    one = layer(chain=96)
    assert prefer_panels(nn.Sequential(one), lambda _: None, always(0)) == 0
    assert one._few_rows is None


def test_what_follows_a_product_follows_it_still() -> None:
    one = layer(chain=96)
    prefer_panels(nn.Sequential(one), lambda _: None, always(4))
    one.addition = lambda values, result: result.add_(values.sum())
    for count in (3, 9):
        values = rows(count)
        assert torch.equal(one(values), PanelProduct(one, 96)(values) + values.sum())


def test_rows_may_have_more_axes_and_lie_anywhere() -> None:
    one = layer()
    product = PanelProduct(one, 96)
    values = rows(12).reshape(3, 4, 96).transpose(0, 1)
    assert not values.is_contiguous()
    assert torch.equal(product(values), product(values.reshape(12, 96)).reshape(4, 3, 80))


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gpt_neox", "opt"])
def test_a_model_says_the_same_with_panels_and_without(
    family: str, new_model: Callable[[str], PreTrainedModel]
) -> None:
    """To the last bit, in passes of a row, of a few rows, and of more than any panel serves."""
    with_panels = tiny_target_with_panels(new_model(family))
    without = tiny_target(new_model(family).bfloat16().float())
    for length in (1, 2, 5, 19, 60):
        tokens = [3 + number % (VOCAB - 3) for number in range(length)]
        logits = []
        for target in (with_panels, without):
            cache = SequenceCache(target.cache, 64)
            logits.append(target.forward(target.plan([SequenceRows(cache, tokens)])))
            cache.release()
        assert torch.equal(*logits)
    with_panels.row_multiple = 1
    assert rows_stand_alone(with_panels, VOCAB)
