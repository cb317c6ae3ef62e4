"""A row's result does not depend on which experts other rows chose, and padding chooses none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from verifier_svc.layers.experts import PackedExperts, pack_experts, replaced_experts

ROWS, HIDDEN, EXPERTS, CHOSEN = 37, 64, 6, 2


def mixtral() -> nn.Module:
    return MixtralExperts(
        MixtralConfig(
            hidden_size=HIDDEN, intermediate_size=96, num_local_experts=EXPERTS, experts_implementation="eager"
        )
    )


def gpt_oss() -> nn.Module:
    return GptOssExperts(
        GptOssConfig(
            hidden_size=HIDDEN, intermediate_size=96, num_local_experts=EXPERTS, experts_implementation="eager"
        )
    )


@pytest.fixture(params=[mixtral, gpt_oss], ids=["gate and up", "transposed, with biases"])
def block(request: pytest.FixtureRequest) -> nn.Module:
    """A block of a model, with random experts."""
    block = nn.ModuleDict({"experts": request.param()})
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return block


Replace = Callable[[nn.Module], int]


@pytest.fixture
def replace_experts() -> Replace:
    """Replaces a block's experts; returns their number."""
    return pack_experts


def routed() -> tuple[Tensor, Tensor, Tensor]:
    """Rows, their experts and weights; the first expert has many rows, the last has none."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(ROWS, EXPERTS, generator=generator) + torch.tensor([0.5, 0, 0, 0, 0, -1])
    weights, index = scores.topk(CHOSEN)
    return torch.randn(ROWS, HIDDEN, generator=generator), index, weights.softmax(-1)


@torch.inference_mode()
def test_they_compute_what_the_modules_do(block: nn.Module, replace_experts: Replace) -> None:
    expected = block["experts"](*routed())
    assert replace_experts(block) == 1
    [experts] = replaced_experts(block)
    experts.num_rows = ROWS
    assert torch.allclose(experts(*routed()), expected, atol=1e-4)


@torch.inference_mode()
def test_a_row_has_the_same_bits_in_every_company(block: nn.Module, replace_experts: Replace) -> None:
    replace_experts(block)
    experts = block["experts"]
    rows, index, weights = routed()
    experts.num_rows = ROWS
    expected = experts(rows, index, weights)
    generator = torch.Generator().manual_seed(2)
    for size in (1, 2, 3, 5, 11, ROWS):
        some = torch.randperm(ROWS, generator=generator)[:size]
        experts.num_rows = size
        assert torch.equal(experts(rows[some], index[some], weights[some]), expected[some])


@torch.inference_mode()
def test_rows_of_padding_choose_no_expert(block: nn.Module) -> None:
    pack_experts(block)
    experts = block["experts"]
    rows, index, weights = routed()
    experts.num_rows = 1
    used: list[int] = []
    for number, layer in enumerate(experts.up):
        layer.register_forward_pre_hook(lambda *_, number=number: used.append(number))
    output = experts(rows, index, weights)
    assert sorted(used) == sorted(index[0].tolist())
    assert not output[1:].any()


def test_experts_of_another_interface_are_left_alone() -> None:
    block = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)])})
    assert pack_experts(block) == 0
    assert not isinstance(block["experts"], PackedExperts)
