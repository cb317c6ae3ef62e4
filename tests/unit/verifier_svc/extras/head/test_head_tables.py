"""A head reads the tables that a target holds in bfloat16, which are those of its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coppice.draft_models.eagle.target_rows import read_target_rows
from verifier_svc.extras.head.loading import target_rows
from verifier_svc.model.precision import round_weights


@pytest.mark.parametrize("is_tied", [False, True])
def test_tables_of_a_loaded_target_are_those_of_its_checkpoint(tmp_path: Path, is_tied: bool) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        tie_word_embeddings=is_tied,
    )
    model = LlamaForCausalLM(config)
    round_weights(model)
    model.save_pretrained(tmp_path)
    read = read_target_rows(str(tmp_path))
    # In single precision: read from the checkpoint.
    assert target_rows(model, str(tmp_path)).embedding.data_ptr() != model.get_input_embeddings().weight.data_ptr()
    own = target_rows(model.bfloat16(), str(tmp_path))
    assert own.embedding.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert own.output.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert torch.equal(own.embedding, read.embedding)
    assert torch.equal(own.output, read.output)
    assert (own.directory, own.num_layers) == (read.directory, read.num_layers) == (tmp_path, 3)
