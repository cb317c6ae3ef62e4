"""Export of a checkpoint as a GGUF file, for llama.cpp and derived programs.

Keys and tensor names are those of the `gguf` package, which llama.cpp's own converter uses.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from coppice.checkpoints.files import INDEX_FILE, WEIGHTS_FILE, read_object
from coppice.checkpoints.writing import writing_to
from coppice.core.errors import IncompatibleError

# Data types of matrices, with llama.cpp's file type numbers; vectors are float32.
TYPES = {"f32": 0, "bf16": 32, "q8_0": 7}
# llama.cpp's architecture names by `model_type`.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Architecture in which rows rotated together are adjacent; in the others they are half a head apart.
_NEIGHBOURS = "llama"
# llama.cpp's pre-tokenizer names by contents of tokenizer.json; three are recognised by their regular expression for
# digits.
_SINGLE_DIGITS, _GPT2 = "smollm", "gpt-2"
_SPLITS = {"\\p{N}{1,3}|": "llama-bpe", "\\p{N}|": "qwen2"}
_OUTPUT = "lm_head.weight"
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


def export_gguf(directory: Path, out: Path, kind: str) -> None:
    """Write the model in a checkpoint directory to `out`, its matrices as `kind`, one of TYPES.

    Raises:
        IncompatibleError: the architecture or tokenizer cannot be exported.
        OSError: `out` cannot be written; no partial file is left.
    """
    import gguf
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    if config.model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise IncompatibleError(f"{directory} is of model_type {config.model_type!r}; exported are {known}")
    architecture = ARCHITECTURES[config.model_type]
    if (rope := _rope(config)).get("rope_type", "default") != "default":
        raise IncompatibleError(f"{directory} has rope of type {rope['rope_type']!r}, which is not exported")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise IncompatibleError(f"{directory} has layers with a sliding window, which are not exported")
    handle, part = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
    os.close(handle)
    try:
        with writing_to(out):
            writer = gguf.GGUFWriter(part, architecture)
            _add_settings(writer, config, float(rope["rope_theta"]), directory.name, kind)
            _add_tokenizer(writer, directory, config.vocab_size)
            _write_tensors(writer, directory, config, architecture, kind)
            writer.close()
        Path(part).replace(out)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def _rope(config: Any) -> dict[str, Any]:
    """Type and base of rotary positions, in any version of the library."""
    found: dict[str, Any] = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return {"rope_theta": getattr(config, "rope_theta", 10000.0), **found}


def _add_settings(writer: Any, config: Any, rope_theta: float, name: str, kind: str) -> None:
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_name(name)
    writer.add_file_type(TYPES[kind])
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", None) or heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_tokenizer(writer: Any, directory: Path, vocab_size: int) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    if model["type"] != "BPE" or (content.get("decoder") or {}).get("type") != "ByteLevel":
        raise IncompatibleError(f"{directory} has a tokenizer other than a byte-level BPE, which is not exported")
    texts = {token: text for text, token in model["vocab"].items()}
    kinds = dict.fromkeys(texts, _NORMAL)
    for added in content["added_tokens"]:
        texts[added["id"]] = added["content"]
        kinds[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    size = max(vocab_size, max(texts) + 1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split_name(directory, content.get("pre_tokenizer")))
    writer.add_token_list([texts.get(token, f"[PAD{token}]") for token in range(size)])
    writer.add_token_types([kinds.get(token, _UNUSED) for token in range(size)])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    for name in ("bos", "eos", "unk", "pad"):
        if (token := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(token)
    begins = tokenizer("").input_ids[:1]
    writer.add_add_bos_token(bool(begins) and begins == [tokenizer.bos_token_id])
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _split_name(directory: Path, pre_tokenizer: dict[str, Any] | None) -> str:
    parts = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    kinds = [part and part["type"] for part in parts]
    if kinds == ["Digits", "ByteLevel"] and parts[0]["individual_digits"]:
        return _SINGLE_DIGITS
    if kinds == ["ByteLevel"]:
        return _GPT2
    if kinds == ["Split", "ByteLevel"]:
        regex = parts[0]["pattern"].get("Regex", "")
        for mark, name in _SPLITS.items():
            if mark in regex:
                return name
    raise IncompatibleError(f"{directory} has a pre-tokenizer that is not exported: {kinds}")


def _write_tensors(writer: Any, directory: Path, config: Any, architecture: str, kind: str) -> None:
    import gguf
    import torch

    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    types = gguf.GGMLQuantizationType
    plan = []
    with contextlib.ExitStack() as stack:
        # The header describes all tensors before the first one.
        for name, tensor in _stored(directory, stack, is_tied=config.tie_word_embeddings):
            if (theirs := names.get_name(name, (".weight", ".bias"))) is None:
                raise IncompatibleError(f"{directory} has the tensor {name}, which is not exported")
            shape = tensor.get_shape()
            as_kind = types[kind.upper()] if len(shape) > 1 else types.F32
            if shape[-1] % gguf.GGML_QUANT_SIZES[as_kind][0]:
                as_kind = types.F32
            block, num_bytes = gguf.GGML_QUANT_SIZES[as_kind]
            size = math.prod(shape) // block * num_bytes
            writer.add_tensor_info(theirs, shape, np.dtype(np.float32), size, raw_dtype=as_kind)
            plan.append((name, tensor, as_kind))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, stored, as_kind in plan:
            tensor = stored[:].to(torch.float32)
            if architecture == _NEIGHBOURS and (heads := _rotating_heads(name, config)):
                tensor = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
            writer.write_tensor_data(gguf.quants.quantize(tensor.contiguous().numpy(), as_kind))


def _stored(directory: Path, stack: contextlib.ExitStack, *, is_tied: bool) -> Iterator[tuple[str, Any]]:
    """Names and lazy slices of all tensors."""
    from safetensors import safe_open

    files = [WEIGHTS_FILE]
    if not (directory / WEIGHTS_FILE).is_file():
        files = sorted(set(read_object(directory / INDEX_FILE)["weight_map"].values()))
    for file in files:
        opened = stack.enter_context(safe_open(directory / file, "pt"))
        for name in opened.keys():  # noqa: SIM118  no mapping
            if not (is_tied and name == _OUTPUT):
                yield name, opened.get_slice(name)


def _rotating_heads(name: str, config: Any) -> int:
    """Heads of a query or key projection, whose rows are rotated; 0 for other tensors."""
    if ".q_proj." in name:
        return int(config.num_attention_heads)
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads) if ".k_proj." in name else 0
