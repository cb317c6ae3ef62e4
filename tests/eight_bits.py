"""Models whose weights, and whose matrices' inputs, are whole numbers of 8-bit steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from coppice.draft_models.kernels.cpu.int8_inputs import is_available
from coppice.draft_models.kernels.cpu.int8_weights import quantise

needs_int8_inputs = pytest.mark.skipif(not is_available(), reason="this machine has no AVX-512 VNNI")


def round_to_8_bits(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model with every matrix as the compiled pass reads it. Embeddings that are the head, too, must be its own."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed_tokens" not in name:
                values, scales = quantise(parameter.numpy())
                parameter.copy_(torch.from_numpy(values * scales[:, None]))
    return model


def round_inputs_to_8_bits(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model with the inputs of every matrix rounded, row by row, as `int8_inputs` rounds them."""

    def rounded(module: nn.Module, arguments: tuple[Tensor]) -> Tensor:
        (inputs,) = arguments
        scales = inputs.abs().amax(-1, keepdim=True) / 127
        return (inputs / scales).round() * scales

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(rounded)
    return model
