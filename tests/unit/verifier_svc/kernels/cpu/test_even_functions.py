"""Functions called by a model's own code have the same bits for a row at any place of its tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifier_svc.kernels.cpu.even_functions import EvenFunctions

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "a method": lambda values: values.sigmoid(),
    "silu": F.silu,
    "softplus": F.softplus,
    "exp": torch.exp,
    "gelu": lambda values: F.gelu(values, approximate="tanh"),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_an_element_has_the_same_bits_in_every_size(function: Callable[[Tensor], Tensor]) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    with EvenFunctions():
        expected = function(values)
        for size in (1, 7, 8, 33, 999):
            assert torch.equal(function(values[:size]), expected[:size])
    assert torch.allclose(expected, function(values))


def test_a_bare_weight_is_packed_once_and_gives_the_same_product() -> None:
    weight = nn.Parameter(torch.randn(5, 48, generator=torch.Generator().manual_seed(1)))
    rows = torch.randn(64, 48, generator=torch.Generator().manual_seed(2))
    functions = EvenFunctions()
    with torch.inference_mode(), functions:
        expected = F.linear(rows, weight)
        for size in (4, 8, 20):
            assert torch.equal(F.linear(rows[:size], weight), expected[:size])
    assert len(functions._products) == 1
    assert torch.allclose(expected, rows @ weight.t(), atol=1e-5)


def test_other_calls_are_left_as_they_are() -> None:
    rows, weight, bias = torch.randn(3, 4), torch.randn(2, 4), torch.randn(2)
    expected, plain = F.linear(rows, weight, bias), torch.sigmoid(rows)
    with EvenFunctions():
        assert torch.equal(F.linear(rows, weight, bias), expected)
        assert torch.equal(torch.sigmoid(input=rows), plain)
