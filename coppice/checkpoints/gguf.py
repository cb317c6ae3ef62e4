"""GGUF files as checkpoints: read once with `transformers`, dequantised exactly, saved as a checkpoint directory.

All other code, the checks of this process included, then sees a regular directory of safetensors.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coppice.checkpoints.files import WEIGHTS_FILE, one_line, unreadable
from coppice.checkpoints.loaded_weights import quiet_loading, refuse_incomplete, refuse_not_finite
from coppice.checkpoints.writing import writing_to
from coppice.core.errors import IncompatibleError

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
# Metadata of a converted checkpoint's weights file.
_METADATA = {"format": "pt", "source": "gguf"}
# Packages that `transformers` needs for GGUF files.
_NEEDED = ("gguf", "accelerate")
_SPLIT = "split.count"
_PRE_TOKENIZER = "tokenizer.ggml.pre"
# Pre-tokenizers, in llama.cpp's names, that split digits one by one. `transformers` knows some splits and uses GPT-2's
# for all others, which does not.
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})


def is_gguf(model: str) -> bool:
    """Whether `model` names a GGUF file."""
    path = Path(model)
    return path.suffix.lower() == SUFFIX and path.is_file()


def is_converted(model: str) -> bool:
    """Whether `model` is a checkpoint directory that `write_checkpoint` made."""
    file = Path(model) / WEIGHTS_FILE
    if not file.is_file():
        return False
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return bool(opened.metadata() == _METADATA)


def read_fields(file: Path) -> dict[str, Any]:
    """Scalar metadata of a GGUF file by key; this also finds truncated files.

    Raises:
        IncompatibleError: a package is missing; the file is not GGUF, damaged, truncated, or one of several parts.
    """
    _refuse_other_files(file)
    missing = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise IncompatibleError(
            f"reading {file} needs the package{'s' * (len(missing) > 1)} {' and '.join(missing)}: "
            f"pip install {' '.join(missing)}"
        )
    from gguf import GGUFReader

    try:
        found = GGUFReader(file).fields
        fields = {name: field.contents() for name, field in found.items() if len(field.types) == 1}
    except Exception as error:
        # Of many types, by the place of the damage.
        raise IncompatibleError(f"{file} is damaged or cut short") from error
    if fields.get(_SPLIT, 1) > 1:
        raise IncompatibleError(f"{file} is one of {fields[_SPLIT]} parts: merge them first (llama-gguf-split --merge)")
    return fields


def write_checkpoint(file: Path, fields: Mapping[str, Any], directory: Path) -> None:
    """Convert a GGUF file with these fields to a safetensors checkpoint in an empty directory.

    Weights are dequantised to float32 and stored in the smallest of bfloat16, float16 and float32 that holds them
    exactly, tensor by tensor.

    Raises:
        IncompatibleError: `transformers` cannot read the model.
        OSError: the directory cannot be written.
    """
    model, tokenizer = _loaded(file, fields.get(f"{fields.get('general.architecture')}.attention.key_length"))
    refuse_not_finite(str(file), model.state_dict().items())
    if fields.get(_PRE_TOKENIZER) in _SINGLE_DIGITS:
        _split_digits(tokenizer)
    with writing_to(directory):
        _save(model, directory)
        tokenizer.save_pretrained(directory)


def _refuse_other_files(file: Path) -> None:
    try:
        with file.open("rb") as opened:
            magic = opened.read(len(_MAGIC))
    except OSError as error:
        raise IncompatibleError(f"{file} {unreadable(error)}") from error
    if magic != _MAGIC:
        raise IncompatibleError(f"{file} is empty" if not magic else f"{file} is not a GGUF file, despite its name")


def _loaded(file: Path, head_size: int | None) -> tuple[Any, Any]:
    """Model in float32 and tokenizer. `head_size` is for architectures whose key length the library ignores."""
    import torch
    import transformers

    whole: dict[str, Any] = {}
    if config := getattr(transformers, "GgufConfig", None):
        # Newer versions can also keep quantised weights.
        whole["quantization_config"] = config(dequantize=True)
    try:
        # No progress bars in a service's log.
        with quiet_loading(), contextlib.redirect_stderr(io.StringIO()):
            config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
            if head_size is not None:
                config.head_dim = head_size
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                file.parent,
                config=config,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                gguf_file=file.name,
                # GGUF has neither safetensors nor code; other files of the directory must not be read.
                use_safetensors=True,
                trust_remote_code=False,
                **whole,
            )
            model, found = loaded
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                file.parent, gguf_file=file.name, trust_remote_code=False
            )
    except Exception as error:
        # Of many types, by the cause.
        raise IncompatibleError(f"{file} cannot be read: {one_line(error)}") from error
    refuse_incomplete(str(file), found, model.state_dict().keys(), model.config.get_text_config())
    return model, tokenizer


def _save(model: Any, directory: Path) -> None:
    from safetensors.torch import save_file

    kept: dict[str, Any] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        # A tied tensor is stored once.
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            kept[name] = _smallest(tensor)
    save_file(kept, directory / WEIGHTS_FILE, _METADATA)
    matrices = {tensor.dtype for tensor in kept.values() if tensor.dim() > 1}
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = matrices.pop() if len(matrices) == 1 else "float32"
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)


def _smallest(tensor: Any) -> Any:
    """The tensor in the smallest data type that holds it exactly."""
    import torch

    for dtype in (torch.bfloat16, torch.float16):
        smaller = tensor.to(dtype)
        if torch.equal(smaller.to(tensor.dtype), tensor):
            return smaller.contiguous()
    return tensor.contiguous()


def _split_digits(tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
