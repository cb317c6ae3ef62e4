"""Small random checkpoints in each format that targets come in, each with the model that is in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from coppice.checkpoints.catalogue import local_model
from coppice.checkpoints.gguf_export import export_gguf
from tests.families.checkpoints import FAMILIES, VOCAB, Family
from tests.unit.coppice.checkpoints.test_gguf import requantise, write_model

LARGE = 262_144
_LLAMA = "LlamaForCausalLM"
# Weights of a block of Q4_K, and of each of its parts.
_BLOCK, _PART = 256, 32
_PARTS = _BLOCK // _PART
# Rows of that format are whole blocks; sizes of a model that has such rows.
_WHOLE_BLOCKS: dict[str, Any] = {
    "hidden_size": _BLOCK,
    "intermediate_size": _BLOCK,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
}


@dataclass(frozen=True)
class Written:
    """A checkpoint directory, and its model in single precision, made without what reads the format."""

    directory: Path
    expected: PreTrainedModel


def q4_k(shape: tuple[int, ...], generator: np.random.Generator) -> tuple[Any, torch.Tensor]:
    """Random blocks of Q4_K [rows, bytes], and the weights [rows, columns] that they stand for by its definition.

    A block is a scale and a scale of minima, both of 16 bits; twelve bytes with 6 bits of each part's scale and
    minimum; and 4 bits of each weight, two parts side by side.
    """
    blocks = int(np.prod(shape)) // _BLOCK
    scale, least = (np.full((blocks, 1), value, np.float16) for value in (4e-4, 3e-3))
    scales, minima = (generator.integers(0, 64, (blocks, _PARTS)) for _ in range(2))
    numbers = generator.integers(0, 16, (blocks, _PARTS, _PART))
    first, last = slice(0, _PARTS // 2), slice(_PARTS // 2, _PARTS)
    packed = [
        scales[:, first] | scales[:, last] >> 4 << 6,
        minima[:, first] | minima[:, last] >> 4 << 6,
        scales[:, last] & 15 | (minima[:, last] & 15) << 4,
    ]
    pairs = (numbers[:, 0::2] | numbers[:, 1::2] << 4).reshape(blocks, -1)
    heads = [scale.view(np.uint8), least.view(np.uint8)]
    rows = np.concatenate([*heads, np.concatenate([*packed, pairs], 1).astype(np.uint8)], 1)
    by_part = scale.astype(np.float32) * scales, least.astype(np.float32) * minima
    weights = by_part[0][..., None] * numbers - by_part[1][..., None]
    return rows.reshape(shape[0], -1), torch.from_numpy(weights.astype(np.float32).reshape(shape))


def _gguf(kind: str) -> Callable[[Path], Written]:
    """A GGUF file with matrices of a type that the `gguf` package writes."""
    number = gguf.GGMLQuantizationType[kind]

    def write(place: Path) -> Written:
        source = write_model(place / "source")
        export_gguf(source, place / "f32.gguf", "f32")
        requantise(place / "f32.gguf", place / f"{kind}.gguf", number)
        model = _single(source)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.dim() > 1:
                    tensor.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), number), number)))
        return Written(Path(local_model(str(place / f"{kind}.gguf"))), model)

    return write


def _q4_k(place: Path) -> Written:
    source = write_model(place / "source", "qwen2", **_WHOLE_BLOCKS)
    export_gguf(source, place / "f32.gguf", "f32")
    generator, matrices = np.random.default_rng(0), dict[str, torch.Tensor]()

    def random_blocks(name: str, values: Any) -> Any:
        rows, matrices[name] = q4_k(values.shape, generator)
        return rows

    requantise(place / "f32.gguf", place / "q4_k.gguf", gguf.GGMLQuantizationType.Q4_K, random_blocks)
    model = _single(source)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.dim() > 1:
                tensor.copy_(matrices[f"{names.get_name(name.removesuffix('.weight'))}.weight"])
    return Written(Path(local_model(str(place / "q4_k.gguf"))), model)


def _safetensors(family: Family, dtype: torch.dtype = torch.float32, **saving: Any) -> Callable[[Path], Written]:
    """A checkpoint directory with tensors of a data type."""

    def write(place: Path) -> Written:
        family.write(place)
        model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=dtype)
        for old in place.glob("*.safetensors"):
            old.unlink()
        model.save_pretrained(place, **saving)
        return Written(place, model.float())

    return write


def _single(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model


def _llama(**settings: Any) -> Family:
    return Family(_LLAMA, settings)


FORMATS: dict[str, Callable[[Path], Written]] = {
    **{f"GGUF, {kind}": _gguf(kind) for kind in ("Q4_0", "Q8_0", "F16", "BF16")},
    "GGUF, Q4_K": _q4_k,
    "safetensors in shards": _safetensors(_llama(), max_shard_size="20KB"),
    "float16": _safetensors(_llama(), torch.float16),
    "bfloat16": _safetensors(_llama(), torch.bfloat16),
    # The tokenizer has `VOCAB` tokens.
    "padded vocabulary": _safetensors(_llama(vocab_size=VOCAB + 31)),
    "tied embeddings": _safetensors(_llama(tie_word_embeddings=True)),
    "untied embeddings": _safetensors(_llama(tie_word_embeddings=False)),
    "sliding window": _safetensors(FAMILIES["mistral"]),
    "vocabulary of 262,144 tokens": _safetensors(_llama(vocab_size=LARGE, tie_word_embeddings=True), torch.bfloat16),
    "context of 262,144 tokens": _safetensors(_llama(max_position_embeddings=LARGE)),
}


def stored_in(directory: Path) -> str:
    """Files and data types of a checkpoint's weights."""
    files = sorted(directory.glob("*.safetensors"))
    kinds = {str(tensor.dtype).removeprefix("torch.") for file in files for tensor in load_file(file).values()}
    of_files = "1 file" if len(files) == 1 else f"{len(files)} files"
    return f"{of_files}, {' and '.join(sorted(kinds))}"


def is_tied(directory: Path) -> bool:
    """Whether the output layer is the embeddings."""
    return bool(json.loads((directory / "config.json").read_text()).get("tie_word_embeddings"))
