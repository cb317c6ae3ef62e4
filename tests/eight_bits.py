"""Models whose weights are whole numbers of 8-bit steps: compiled draft steps then have nothing to round."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from drafter_svc.drafters.few_rows import quantise


def round_to_8_bits(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model with every matrix as the compiled pass reads it. Embeddings that are the head, too, must be its own."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed_tokens" not in name:
                values, scales = quantise(parameter.numpy())
                parameter.copy_(torch.from_numpy(values * scales[:, None]))
    return model
