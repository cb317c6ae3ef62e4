"""RMS norms are compiled where they are what they are called, and a row's bits are then its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaWeightlessRMSNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.unit.verifier_svc.conftest import VOCAB
from tests.unit.verifier_svc.tiny_engine import tiny_target
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.kernels.cpu.norms import CompiledNorm, compile_norms
from verifier_svc.model.exactness_probe import rows_stand_alone

WIDTH = 96


def norm_of(width: int = WIDTH, epsilon: float = 1e-3) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(width, eps=epsilon)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    return norm


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(2))


def compiled(norm: nn.Module) -> nn.Module:
    parent = nn.Sequential(norm)
    compile_norms(parent)
    return parent[0]


@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company() -> None:
    norm = compiled(norm_of())
    rows = values(40)
    alone = torch.cat([norm(row[None]) for row in rows])
    for count in (2, 3, 8, 40):
        assert torch.equal(norm(rows[:count]), alone[:count])
    by_column = rows.T.contiguous().T
    assert not by_column.is_contiguous()
    assert torch.equal(norm(by_column), alone)
    assert torch.equal(norm(rows.reshape(2, 4, 5, WIDTH)), alone.reshape(2, 4, 5, WIDTH))


@torch.inference_mode()
def test_weights_that_are_stored_minus_1_are_known() -> None:
    norm = GemmaRMSNorm(WIDTH)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(3))
    replaced = compiled(norm)
    assert isinstance(replaced, CompiledNorm)
    assert torch.allclose(replaced(values(7)), norm(values(7)), atol=1e-5)
    assert replaced.weight is norm.weight


class OtherRMSNorm(LlamaRMSNorm):
    """Called like one, and something else."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + 1e-4


def in_half_precision() -> nn.Module:
    return norm_of().bfloat16()


@pytest.mark.parametrize(
    "new_norm",
    [
        lambda: OtherRMSNorm(WIDTH),
        lambda: nn.LayerNorm(WIDTH),
        lambda: norm_of(WIDTH + 8),
        in_half_precision,
    ],
)
def test_everything_else_is_left_alone(new_norm: Callable[[], nn.Module]) -> None:
    norm = new_norm()
    assert compiled(norm) is norm


@pytest.mark.parametrize(("family", "number"), [("llama", 5), ("qwen3", 9), ("mistral", 5), ("gpt2", 0), ("opt", 0)])
def test_a_model_says_the_same(family: str, number: int, new_model: Callable[[str], PreTrainedModel]) -> None:
    plain, target = new_model(family), tiny_target(new_model(family))
    assert compile_norms(target.model) == number
    assert compile_norms(target.model) == 0, "once"
    assert sum(isinstance(module, CompiledNorm) for module in target.model.modules()) == number
    tokens = list(range(5, 25))
    cache = SequenceCache(target.cache, 64)
    logits = target.forward(target.plan([SequenceRows(cache, tokens)]))[:1]
    cache.release()
    with torch.inference_mode():
        expected = plain(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits, expected[-1:], rtol=1e-4, atol=1e-4)
    if number:
        assert rows_stand_alone(target, VOCAB)


def test_a_norm_without_weights_stays_as_it_is() -> None:
    # It is called with rows of another width than that of the tensor which is called its weight.
    assert isinstance(compiled(FalconMambaWeightlessRMSNorm(WIDTH)), FalconMambaWeightlessRMSNorm)
