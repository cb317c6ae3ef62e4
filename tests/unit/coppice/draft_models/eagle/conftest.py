"""A tiny target for eagle drafters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_checkpoint import write_tiny_llama

VOCAB = 61


@pytest.fixture(scope="session")
def eagle_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory."""
    directory = tmp_path_factory.mktemp("eagle_target")
    write_tiny_llama(directory, vocab_size=VOCAB, max_context_tokens=256, num_hidden_layers=8)
    return directory
