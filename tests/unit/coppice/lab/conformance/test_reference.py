"""The reference has the weights that a verifier serves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from coppice.checkpoints.quantization import quantize_linears
from coppice.lab.conformance.reference import ReferenceModel
from tests.tiny_checkpoint import write_tiny_llama


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_in_8_bits_are_made_of_the_checkpoint_s_own_numbers(dtype: str, tmp_path: Path) -> None:
    """Those of rounded ones are others: a weight in the middle of two whole numbers goes to either."""
    write_tiny_llama(tmp_path, vocab_size=64, max_context_tokens=64)
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=one) for one in (torch.float32, torch.bfloat16)
    )
    for model in (exact, rounded):
        quantize_linears(model)
    found = ReferenceModel(tmp_path, dtype, "int8")._model
    assert found.dtype == getattr(torch, dtype)
    pairs = list(zip(found.parameters(), exact.parameters(), rounded.parameters(), strict=True))
    assert all(torch.equal(own.float(), weights.to(found.dtype).float()) for own, weights, _ in pairs)
    assert not all(torch.equal(own.float(), weights.float()) for own, _, weights in pairs)
