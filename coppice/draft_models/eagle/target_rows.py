"""Embeddings and output layer of a target, read from its checkpoint without the rest of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coppice.checkpoints.catalogue import local_model
from coppice.checkpoints.files import WEIGHTS_FILE, named, read_config, read_object
from coppice.checkpoints.loaded_weights import refuse_not_finite
from coppice.core.errors import IncompatibleError

_INDEX_FILE = "model.safetensors.index.json"
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings)\.weight$")
_OUTPUT = re.compile(r"(^|\.)(lm_head|embed_out|output)\.weight$")


@dataclass(frozen=True, slots=True)
class TargetRows:
    """Tables [vocab, hidden] in bfloat16, one tensor if they are tied, of a target with `num_layers` in `directory`."""

    directory: Path
    embedding: Tensor
    output: Tensor
    num_layers: int


def read_target_rows(reference: str, tell: Callable[[str], None] = lambda _: None) -> TargetRows:
    """Read a target's tables; `reference` is a checkpoint directory, a GGUF file or a short name.

    Raises:
        IncompatibleError: the checkpoint cannot be read, or it has no such tables.
    """
    directory = Path(local_model(reference, tell))
    if not directory.is_dir():
        raise IncompatibleError(f"TARGET_MODEL {reference!r} is no checkpoint directory")
    places = _places(directory)
    embedding = _read(directory, places, _only(reference, places, _EMBEDDING, "embedding table"))
    outputs = [name for name in places if _OUTPUT.search(name)]
    output = _read(directory, places, _only(reference, places, _OUTPUT, "output layer")) if outputs else embedding
    if output.shape != embedding.shape:
        raise IncompatibleError(
            f"{reference} has embeddings {list(embedding.shape)} and an output layer {list(output.shape)}"
        )
    config = read_config(str(directory))
    text = config.get("text_config", config)
    layers = text.get("num_hidden_layers", text.get("n_layer"))
    if not isinstance(layers, int) or layers < 1:
        raise IncompatibleError(f"config.json of {reference} does not say how many layers the model has")
    return TargetRows(directory, embedding, output, layers)


def _places(directory: Path) -> Mapping[str, str]:
    """File of each tensor."""
    try:
        if (directory / WEIGHTS_FILE).is_file():
            with safe_open(directory / WEIGHTS_FILE, "pt") as file:
                return dict.fromkeys(file.keys(), WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise IncompatibleError(f"{WEIGHTS_FILE} of {directory} cannot be read: {error}") from error
    if not (directory / _INDEX_FILE).is_file():
        raise IncompatibleError(f"{directory} has no weights in safetensors")
    places = read_object(directory / _INDEX_FILE).get("weight_map")
    if not isinstance(places, dict) or not all(Path(str(place)).name == place for place in places.values()):
        raise IncompatibleError(f"{_INDEX_FILE} of {directory} does not say where tensors are")
    return places


def _only(reference: str, places: Mapping[str, str], pattern: re.Pattern[str], what: str) -> str:
    found = sorted(name for name in places if pattern.search(name))
    if len(found) != 1:
        names = f": {named(found, 'tensor')}" if found else ""
        raise IncompatibleError(f"{reference} has {len(found) or 'no'} tensors of an {what}{names}, and needs one")
    return found[0]


def _read(directory: Path, places: Mapping[str, str], name: str) -> Tensor:
    try:
        with safe_open(directory / places[name], "pt") as file:
            tensor: Tensor = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise IncompatibleError(f"{name} of {directory} cannot be read: {error}") from error
    if tensor.dim() != 2 or not tensor.is_floating_point():
        raise IncompatibleError(f"{name} of {directory} is no matrix of numbers")
    table = tensor.to(torch.bfloat16)
    refuse_not_finite(str(directory), [(name, table)])
    return table
