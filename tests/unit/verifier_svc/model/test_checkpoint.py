"""Which checkpoints are loaded though they are not quite those of their model, and what is told of merged tensors."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

from coppice.checkpoints.files import refuse_unsuitable
from coppice.core.errors import IncompatibleError
from tests.tiny_checkpoint import tiny_llama, write_tiny_llama
from verifier_svc.model.checkpoint import load_checkpoint, read_tokenizer, refuse_larger_tokenizer

VOCAB = 61
WEIGHTS = "model.safetensors"
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load(directory: Path) -> PreTrainedModel:
    refuse_unsuitable(str(directory), transformers)
    return load_checkpoint(str(directory), torch.float32, torch.device("cpu"), None)


def write(directory: Path, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tiny checkpoint with some more tensors, whose names have `__` for dots; returns all of them."""
    write_tiny_llama(directory, vocab_size=VOCAB, max_context_tokens=64)
    every = load_file(directory / WEIGHTS) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(every, directory / WEIGHTS, {"format": "pt"})
    return every


def configure(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_tensors_that_say_nothing_of_their_own_are_left_out(tmp_path: Path) -> None:
    older = {
        "model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(4),
        "model__layers__0__attn__masked_bias": torch.tensor(-1e9),
        "model__position_ids": torch.arange(64),
        "mtp__layers__0__norm__weight": torch.ones(32),
    }
    tensors = write(tmp_path, **older)
    model = load(tmp_path)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())


def test_an_output_layer_beside_the_embeddings_it_is_tied_to_is_let_pass_where_it_is_equal(tmp_path: Path) -> None:
    tensors = write(tmp_path)
    save_file({**tensors, HEAD: tensors[TABLE].clone()}, tmp_path / WEIGHTS, {"format": "pt"})
    configure(tmp_path, tie_word_embeddings=True)
    model = load(tmp_path)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_one_that_is_tied_need_not_be_there(tmp_path: Path) -> None:
    tensors = write(tmp_path)
    del tensors[HEAD]
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    configure(tmp_path, tie_word_embeddings=True)
    assert torch.equal(load(tmp_path).get_output_embeddings().weight, tensors[TABLE])


def test_whole_shards_are_loaded(tmp_path: Path) -> None:
    model = tiny_llama(vocab_size=VOCAB, max_context_tokens=64)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    loaded = load(tmp_path).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the library has them in 8 bits there")
def test_weights_in_8_bits_are_loaded_where_the_library_turns_them_into_plain_ones(tmp_path: Path) -> None:
    tensors = write(tmp_path)
    for name in [name for name in tensors if "_proj" in name]:
        scale = tensors[name].abs().max() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(IncompatibleError, match=r"14 tensors .* in quantised form, but config.json has no"):
        load(tmp_path)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    configure(tmp_path, quantization_config=settings)
    assert {weight.dtype for weight in load(tmp_path).parameters()} <= {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("kept", ["experts.1.w1", "experts.0."])
def test_experts_that_are_missing_are_told_in_one_line(kept: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = MixtralConfig(vocab_size=VOCAB, num_key_value_heads=2, num_local_experts=4, **sizes)
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    load(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    save_file(
        {name: tensor for name, tensor in tensors.items() if kept not in name}, tmp_path / WEIGHTS, {"format": "pt"}
    )
    with pytest.raises(IncompatibleError, match=r"such as those of experts|experts.*of other shapes") as told:
        load(tmp_path)
    assert "\n" not in str(told.value)


def test_tokens_that_were_added_to_a_tokenizer_and_not_to_the_model_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_llama(tmp_path, vocab_size=VOCAB, max_context_tokens=64)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    token = {"id": VOCAB, "content": "<pad>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"].append({**token, **flags})
    path.write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING):
        refuse_larger_tokenizer(str(tmp_path), read_tokenizer(str(tmp_path)).json, VOCAB)
    assert f"has added tokens that the model does not know: [{VOCAB}]" in caplog.text
