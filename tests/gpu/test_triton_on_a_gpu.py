"""The Triton kernel beside tensor operations in double precision, and beside itself in other company."""

from __future__ import annotations

import pytest
import torch

from tests.unit.verifier_svc.attention_passes import Heads, RandomPass, Share
from verifier_svc.kernels.base import AttentionRule
from verifier_svc.kernels.triton import plan as triton_plan
from verifier_svc.kernels.triton.plan import SPLIT
from verifier_svc.model.parallel.tensor_attention import TensorKernel

pytestmark = pytest.mark.gpu
triton_attention = pytest.importorskip("verifier_svc.kernels.triton.attention", reason="Triton is not installed")

HEADS = {"grouped": Heads(32, 8, 128, 128), "odd": Heads(7, 1, 80, 48), "plain": Heads(4, 4, 64, 64)}
RULES = {
    "softmax": AttentionRule(0.1),
    "window": AttentionRule(0.1, sliding_window=200),
    "soft cap and sinks": AttentionRule(0.1, softcap=5.0, sinks=torch.tensor([0.5, 3.0, -2.0, 0.0] * 8)),
}
# Largest difference of a mean of normal numbers.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
SHARES = (Share(1, 0, 100), Share(2, SPLIT, 1), Share(3, 5 * SPLIT - 3, 2, 70), Share(4, 20, 1, 7))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("heads", HEADS)
def test_outputs_are_those_of_attention_in_double_precision(
    heads: str, rule: str, dtype: torch.dtype, device: torch.device
) -> None:
    shape, asked = HEADS[heads], RULES[rule]
    if asked.sinks is not None:
        asked = AttentionRule(asked.scale, None, asked.softcap, asked.sinks[: shape.query])
    one = RandomPass(shape, SHARES, dtype, row_multiple=64)
    expected = one.run_padded(TensorKernel(torch.device("cpu"), exact=True), asked)
    on_device = AttentionRule(
        asked.scale, asked.sliding_window, asked.softcap, None if asked.sinks is None else asked.sinks.to(device)
    )
    got = one.run_padded(triton_attention.TritonKernel(device), on_device, device.type)
    assert torch.allclose(got, expected, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_rows_bits_do_not_depend_on_its_company(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, rule = HEADS["grouped"], RULES["softmax"]
    new_kernel = triton_attention.TritonKernel
    [alone] = RandomPass(shape, [SHARES[2]], dtype).run(new_kernel(device), rule, device.type)
    company = RandomPass(shape, SHARES, dtype, row_multiple=64)
    assert torch.equal(company.run(new_kernel(device), rule, device.type)[2], alone)
    monkeypatch.setattr(triton_plan, "MOST_PARTS", 1)
    assert torch.equal(company.run(new_kernel(device), rule, device.type)[2], alone)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_chain_has_the_same_bits_however_it_is_cut_into_passes(dtype: torch.dtype, device: torch.device) -> None:
    shape, rule = HEADS["grouped"], RULES["softmax"]
    end = SPLIT + 7
    kernel = triton_attention.TritonKernel(device)
    [at_once] = RandomPass(shape, [Share(7, SPLIT - 6, 13)], dtype).run(kernel, rule, device.type)
    for context in range(SPLIT - 6, end):
        rows = [Share(7, context, end - context)]
        [some] = RandomPass(shape, rows, dtype).run(kernel, rule, device.type)
        assert torch.equal(some, at_once[context - SPLIT + 6 :])
