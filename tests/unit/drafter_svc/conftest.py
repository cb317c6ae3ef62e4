"""Small random models."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.tiny_checkpoint import tiny_llama

VOCAB = 61


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    return tiny_llama(vocab_size=VOCAB, max_context_tokens=64, initializer_range=0.4)
