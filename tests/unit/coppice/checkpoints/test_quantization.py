"""Quantised weights: whole numbers times powers of two, near the originals, and the same a second time."""

from __future__ import annotations

import pytest
import torch

from coppice.checkpoints.quantization import quantize_linears, row_scales, whole_numbers
from tests.tiny_checkpoint import tiny_llama


def test_weights_are_whole_numbers_times_a_power_of_two() -> None:
    torch.manual_seed(0)
    weights = torch.randn(200, 50) * torch.logspace(-6, 3, 200)[:, None]
    scales = row_scales(weights)
    assert (scales.frexp()[0] == 0.5).all()
    numbers = whole_numbers(weights, scales)
    assert torch.equal(numbers, numbers.to(torch.int8).float())
    largest = numbers.abs().amax(1)
    assert (largest >= 64).all(), "a smaller power of two would do"
    assert (largest <= 127).all()
    dequantised = numbers * scales[:, None]
    assert ((dequantised - weights).abs() <= scales[:, None] / 2).all()
    assert torch.equal(dequantised.bfloat16().float(), dequantised)


@pytest.mark.parametrize("largest", [127.0, 127.4, 64.0, 63.6, 1e-30, 3e30])
def test_dequantised_weights_have_the_same_scales(largest: float) -> None:
    weights = torch.linspace(-1, 1, 64)[None] * largest
    scales = row_scales(weights)
    dequantised = whole_numbers(weights, scales) * scales[:, None]
    assert torch.equal(row_scales(dequantised), scales)
    assert torch.equal(whole_numbers(dequantised, scales) * scales[:, None], dequantised)


def test_rows_of_zeros_remain() -> None:
    zeros = torch.zeros(3, 5)
    assert torch.equal(whole_numbers(zeros, row_scales(zeros)), zeros)


@pytest.mark.parametrize("is_tied", [True, False])
def test_linear_layers_and_what_is_tied_to_them_are_quantised(is_tied: bool) -> None:
    model, own = (tiny_llama(vocab_size=60, max_context_tokens=64, tie_word_embeddings=is_tied) for _ in range(2))
    quantize_linears(model)
    before = own.state_dict()
    for name, tensor in model.state_dict().items():
        quantised = "proj" in name or "lm_head" in name or (is_tied and "embed" in name)
        assert torch.equal(tensor, before[name]) is not quantised, name
