"""An activation's bits do not depend on what stands beside them, however many threads there are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from verifier_svc.kernels.cpu.even_activations import EvenActivation, even_activations

NAMES = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu")
# Rows of 1152 are whole vectors; those of 172 and 173 are not.
WIDTHS = (172, 173, 1152)
ROWS = (4, 5, 7, 12, 20, 31, 44, 116, 128, 200)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def values(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(width))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bits_alone_and_in_company(name: str, width: int) -> None:
    activation = EvenActivation(ACT2FN[name])
    inputs = values(max(ROWS), width)
    torch.set_num_threads(1)
    alone = torch.cat([activation(row[None]) for row in inputs])
    torch.testing.assert_close(alone, ACT2FN[name](inputs), rtol=1e-6, atol=1e-6)
    for count in (1, 2, 5, 7):
        torch.set_num_threads(count)
        for rows in ROWS:
            assert torch.equal(activation(inputs[:rows]), alone[:rows]), (count, rows)
            assert torch.equal(activation(inputs[None, :rows])[0], alone[:rows])


def test_the_library_s_own_would_differ() -> None:
    """Without this the test above would prove little; other processors may have other vectors."""
    function = ACT2FN["silu"]
    inputs = values(max(ROWS), 172)
    alone = torch.cat([EvenActivation(function)(row[None]) for row in inputs])
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("known of AVX2 and AVX-512 only")
    assert any(not torch.equal(function(inputs[:rows]), alone[:rows]) for rows in ROWS)


def test_every_activation_of_a_model_is_replaced() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Sequential(ACT2FN["gelu_new"], nn.LayerNorm(8)))
    assert even_activations(model) == 2
    assert isinstance(model[1], EvenActivation)
    assert isinstance(model[2][0], EvenActivation)
    assert isinstance(model[2][1], nn.LayerNorm)
