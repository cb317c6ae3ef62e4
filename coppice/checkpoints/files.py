"""Checks of a checkpoint directory's files, before any library opens them.

Weights must be safetensors and complete, without code, and the configuration must be that of a causal language model
that can be loaded here. Tensors are checked after loading, see `loaded_weights.py`.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coppice.checkpoints.config_numbers import refuse_absurd_numbers, refuse_more_layers
from coppice.checkpoints.hub import refuse_absent
from coppice.core.errors import IncompatibleError

# Weights in pickles, or in formats that may embed pickles.
UNSAFE_KINDS = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5"})
WEIGHTS_FILE = "model.safetensors"
# What was measured of a drafter.
CALIBRATION_FILE = "drafter.json"
INDEX_FILE = "model.safetensors.index.json"
# JSON objects checked if present; the index of sharded weights is checked with the weights.
_OBJECTS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
# Files that a tokenizer can be made of.
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json", "*.spm")
# Data types of unquantised tensors, in safetensors' names.
_PLAIN_NUMBERS = frozenset({"F64", "F32", "F16", "BF16"})
# Same limit as in safetensors.
_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
# Of a JSON file; the largest tokenizers have half of it.
_MAX_JSON_MIB = 64
# Files of a checkpoint that are always read, by their endings.
_NEEDED = frozenset({".json", ".safetensors"})
# Directories of a checkpoint whose files the library reads too.
_INNER = ("additional_chat_templates",)
_MAX_REASON = 300
# Of a message with its reason.
_MAX_MESSAGE = 600
# Endings of causal LM classes beyond those listed by the library.
_CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel")


def config_of_suitable_files(model: str, weights_file: str = WEIGHTS_FILE) -> dict[str, Any]:
    """config.json of a checkpoint directory whose files are those of a model, as far as their names tell.

    Raises:
        IncompatibleError: they are not.
    """
    directory = Path(model)
    refuse_special_files(model)
    _refuse_other_kinds(model, directory, weights_file)
    config = read_config(model)
    if (base := directory / "adapter_config.json").is_file():
        raise IncompatibleError(
            f"{model} has adapters ({base.name}): merge them into the model that they are for (peft: merge_and_unload, "
            "then save_pretrained), without that file"
        )
    return config


def refuse_unsuitable(model: str, transformers: Any, weights_file: str = WEIGHTS_FILE) -> None:
    """Refuse a checkpoint by its files and configuration. `transformers` is the package that loads it later.

    Of a hub id only the configuration is checked; the library fetches the rest under the same rules.

    Raises:
        IncompatibleError: the directory is missing; weights are missing, truncated, quantised in an unsupported way, or
        in a
            format that can carry code; or the model is not a causal language model known to the library.
    """
    directory = Path(model)
    if not directory.is_dir():
        refuse_absent(model)
        try:
            config, _ = transformers.PreTrainedConfig.get_config_dict(model)
        except Exception as error:
            # Of many types, by the cause.
            raise refusal_of(model, error) from error
        refuse_absurd_numbers(model, config)
        _refuse_other_models(model, config, transformers)
        _refuse_unreadable_config(model, transformers)
        _refuse_quantised(model, config, transformers)
        return
    config = config_of_suitable_files(model, weights_file)
    _refuse_other_models(model, config, transformers)
    _refuse_quantised(model, config, transformers)
    for name in _OBJECTS:
        if (directory / name).is_file():
            read_object(directory / name)
    is_quantised = _quantisation(config) is not None
    num_tensors = _refuse_damaged_weights(model, directory, weights_file, is_quantised=is_quantised)
    refuse_more_layers(model, config, num_tensors)
    _refuse_unreadable_config(model, transformers)


def refuse_special_files(model: str) -> None:
    """Refuse a directory with anything but files and directories, or links to them, and JSON files of absurd size.

    Opening a pipe waits forever, and a device has no end. Anything but a directory is left to others.

    Raises:
        IncompatibleError: with the file's name.
    """
    directory = Path(model)
    if not directory.is_dir():
        return
    try:
        paths = [*directory.iterdir(), *(path for inner in _INNER for path in directory.glob(f"{inner}/*"))]
    except OSError as error:
        raise IncompatibleError(f"{model} {unreadable(error)}") from error
    for path in paths:
        name = path.relative_to(directory)
        try:
            found = path.stat()
        except OSError as error:
            raise IncompatibleError(f"{name} of {model} {unreadable(error)}") from error
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise IncompatibleError(f"{name} of {model} is no regular file")
        if path.suffix in _NEEDED and not os.access(path, os.R_OK):
            raise IncompatibleError(f"{name} of {model} {unreadable(PermissionError(errno.EACCES, ''))}")
        if path.suffix == ".json" and found.st_size > _MAX_JSON_MIB << 20:
            raise IncompatibleError(f"{name} of {model} has {found.st_size >> 20} MiB, more than {_MAX_JSON_MIB}")


def refuse_without_tokenizer(model: str) -> None:
    """Raise IncompatibleError if a checkpoint directory has no tokenizer file."""
    directory = Path(model)
    if directory.is_dir() and not any(any(directory.glob(name)) for name in _TOKENIZERS):
        raise IncompatibleError(f"{model} has no tokenizer: tokenizer.json, that of the model, is missing")


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a checkpoint.

    Raises:
        IncompatibleError: the file is missing or not a JSON object.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise IncompatibleError(f"{path.parent} has no {path.name}") from None
    except UnicodeDecodeError as error:
        raise IncompatibleError(f"{path} is not JSON: {error}") from error
    except OSError as error:
        raise IncompatibleError(f"{path} {unreadable(error)}") from error
    if not text.strip():
        raise IncompatibleError(f"{path} is empty")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise IncompatibleError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise IncompatibleError(f"{path} must be a JSON object, is a {type(content).__name__}")
    return content


def read_config(model: str) -> dict[str, Any]:
    """Read config.json of a checkpoint directory.

    Raises:
        IncompatibleError: it is missing, not a JSON object, or has numbers that no model has.
    """
    config = read_object(Path(model) / "config.json")
    refuse_absurd_numbers(model, config)
    return config


def unreadable(error: OSError) -> str:
    """Words after the name of a file that could not be read."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"cannot be read: {reason}{'; let this user read it' if isinstance(error, PermissionError) else ''}"


def message_of(error: BaseException) -> str:
    """An error's text for a log: one line of bounded length."""
    return one_line(error, _MAX_MESSAGE)


def one_line(error: BaseException, longest: int = _MAX_REASON) -> str:
    """First line of an error's text, continued after a `:`; cut after `longest` characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    kept = lines[0]
    for line in lines[1:]:
        if not kept.endswith(":"):
            break
        kept += f" {line}"
    return kept if len(kept) <= longest else f"{kept[:longest]}..."


def reason_of(error: Exception) -> str:
    """One line for an error, with its type unless the text suffices by itself."""
    return one_line(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {one_line(error)}"


def refusal_of(model: str, error: Exception) -> IncompatibleError:
    """Error for a failure of the library to load a checkpoint, as one line with its name."""
    if not Path(model).is_dir() and isinstance(error, OSError):
        return IncompatibleError(
            f"there is no directory {model}, and no such model could be fetched: {one_line(error)}"
        )
    if type(error).__name__ == "SafetensorError":
        return IncompatibleError(f"the weights of {model} are damaged or cut short: {one_line(error)}")
    if is_of_merging(error):
        return IncompatibleError(
            f"{model} has tensors to be merged into one, such as those of experts, that are missing or do not fit "
            "together: is a shard missing?"
        )
    return IncompatibleError(f"{model} cannot be loaded: {reason_of(error)}")


def is_of_merging(error: Exception) -> bool:
    """Whether the library failed to build the model's tensors from the checkpoint's."""
    return isinstance(error, RuntimeError) and "conversion of the weights" in str(error)


def _refuse_other_kinds(model: str, directory: Path, weights_file: str) -> None:
    """Refuse by file names."""
    names = {path.name for path in directory.iterdir()}
    kinds = {Path(name).suffix for name in names}
    if "config.json" not in names and "adapter_config.json" in names:
        base = read_object(directory / "adapter_config.json").get("base_model_name_or_path")
        raise IncompatibleError(
            f"{model} has adapters for {base}, and no model: merge them into it first (peft: merge_and_unload, then "
            "save_pretrained)"
        )
    if ".safetensors" not in kinds:
        if ".gguf" in kinds:
            raise IncompatibleError(
                f"{model} has its weights as GGUF: name the file itself, or have *.safetensors in the directory"
            )
        if kinds & UNSAFE_KINDS:
            raise IncompatibleError(
                f"{model} has no *.safetensors; other formats of weights can carry code and are never read"
            )
    if "config.json" in names and not names & {weights_file, INDEX_FILE}:
        raise IncompatibleError(f"{model} has no weights: neither {weights_file} nor {INDEX_FILE}")


def _refuse_other_models(model: str, config: Mapping[str, Any], transformers: Any) -> None:
    """Refuse all but causal language models of architectures known to the library."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise IncompatibleError(f"config.json of {model} has no model_type, so its architecture is unknown")
    if kind not in transformers.CONFIG_MAPPING:
        # For known architectures the library's class is used, and code next to the weights is ignored.
        if "auto_map" in config:
            raise IncompatibleError(f"{model} needs code of its own, which is never run")
        version = transformers.__version__
        raise IncompatibleError(f"{model} is of model_type {kind!r}, which transformers {version} does not know")
    mappings = transformers.models.auto.modeling_auto
    causal: Mapping[str, str] = mappings.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    named = config.get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    what = f"{names[0]} ({kind})" if names else kind
    is_encoder_decoder = kind in mappings.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES and kind not in causal
    if config.get("is_encoder_decoder") or is_encoder_decoder:
        raise IncompatibleError(f"{model} is an encoder-decoder model, {what}: a decoder-only language model is needed")
    if kind not in causal:
        raise IncompatibleError(f"{model} is a {what}: a causal language model is needed")
    known = {*causal.values()}
    if names and not any(name in known or name.endswith(_CAUSAL_ENDINGS) for name in names):
        hint = f", such as {causal[kind]}" if causal[kind].endswith("ForCausalLM") else ""
        raise IncompatibleError(
            f"{model} is a {what}, which does not predict the next token: a causal language model is needed{hint}"
        )


def _refuse_unreadable_config(model: str, transformers: Any) -> None:
    """Refuse what the library itself does not accept."""
    try:
        transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:
        # Of many types, by the cause.
        raise IncompatibleError(f"config.json of {model} cannot be loaded: {reason_of(error)}") from error


def _refuse_quantised(model: str, config: Mapping[str, Any], transformers: Any) -> None:
    """Refuse quantisation that the library does not know, or lacks a package or device for."""
    settings = _quantisation(config)
    if settings is None:
        return
    try:
        # The library would ignore an unknown method and load the stored integers as weights.
        auto = transformers.quantizers.auto
        quantizer = auto.AutoHfQuantizer.from_config(
            auto.AutoQuantizationConfig.from_dict(settings), pre_quantized=True
        )
        quantizer.validate_environment(device_map=None, weights_only=True)
    except Exception as error:  # of many types, by the cause
        method = settings.get("quant_method", "an unknown method")
        reason = one_line(error).partition(" - supported types")[0]
        raise IncompatibleError(f"{model} is quantised with {method}, which cannot be loaded here: {reason}") from error


def _quantisation(config: Mapping[str, Any]) -> dict[str, Any] | None:
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        if isinstance(settings := part.get("quantization_config"), dict):
            return settings
    return None


def _refuse_damaged_weights(model: str, directory: Path, weights_file: str, *, is_quantised: bool) -> int:
    """Refuse by the headers of the weight files; returns how many tensors they have."""
    names = [weights_file]
    if not (directory / weights_file).is_file():
        places = read_object(directory / INDEX_FILE).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise IncompatibleError(f"{directory / INDEX_FILE} has no weight_map")
        names = sorted(set(places.values()))
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise IncompatibleError(
                f"{model} lacks {named(missing, 'file')} of {len(names)} that {INDEX_FILE} names: was it copied whole?"
            )
    num_tensors = 0
    for name in names:
        try:
            header = _header(directory / name)
        except ValueError as error:
            raise IncompatibleError(f"the weights of {model} are damaged or cut short: {name} {error}") from error
        if not is_quantised and weights_file == WEIGHTS_FILE:
            _refuse_other_numbers(model, header)
        num_tensors += len(header.keys() - {"__metadata__"})
    return num_tensors


def _header(path: Path) -> dict[str, Any]:
    """Header of a safetensors file.

    Raises:
        ValueError: the file is damaged; the message continues its name.
    """
    size = path.stat().st_size
    if size == 0:
        raise ValueError("is empty")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError("has no valid header")
        if _LENGTH_BYTES + length > size:
            raise ValueError(f"ends within its header, after {size} bytes")
        try:
            header = json.loads(file.read(length))
            ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError("has no valid header") from error
    whole = _LENGTH_BYTES + length + max(ends, default=0)
    if whole > size:
        raise ValueError(f"has {size} of {whole} bytes")
    found: dict[str, Any] = header
    return found


def _refuse_other_numbers(model: str, header: Mapping[str, Any]) -> None:
    """Refuse integers stored as weights, which would be loaded as such."""
    strange = [
        f"{name} {entry.get('dtype')}"
        for name, entry in header.items()
        if name.endswith(".weight") and entry.get("dtype") not in _PLAIN_NUMBERS
    ]
    if strange:
        raise IncompatibleError(
            f"{model} has {named(strange, 'tensor')} in quantised form, but config.json has no quantization_config"
        )


def named(names: list[str], noun: str) -> str:
    """A count with its noun and the first five names, such as `7 tensors (a, b, c, d, e and 2 more)`."""
    shown = names[:5]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"{len(names)} {noun}{'' if len(names) == 1 else 's'} ({', '.join(shown)}{more})"
