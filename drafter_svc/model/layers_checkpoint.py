"""A block drafter's checkpoint of layers only, without the embeddings of the small LM that it was initialised from.

Embeddings are two fifths of a small model; a drafter that keeps another's needs no copy. The directory has
`config.json`, `layers.safetensors` and, in `drafter.json`, the other's path (`base`) and the digest of its embeddings.
Matrices are stored in 8 bits with a scale per output, as compiled draft steps use them (`int8_weights.py`), all else in
bfloat16.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from coppice.checkpoints.files import named
from coppice.checkpoints.loaded_weights import refuse_not_finite, refuse_other_names
from coppice.core.errors import IncompatibleError
from coppice.draft_models.kernels.cpu.int8_weights import quantise

LAYERS_FILE = "layers.safetensors"
# Optional further tensors, see `drafters/block/transition.py`.
TRANSITION = ("transition.before", "transition.behind")
_DESCRIPTION_FILE = "drafter.json"
_TABLES = ("model.embed_tokens.weight", "lm_head.weight")
_MASKS = "masks."
_SCALES = ".scales"


def has_layers_alone(reference: str) -> bool:
    """Whether a checkpoint only has layers."""
    return (Path(reference) / LAYERS_FILE).is_file()


def base_of(reference: str) -> str:
    """Path of the checkpoint with the embeddings and the tokenizer: another one, or itself.

    Raises:
        IncompatibleError: the base of a layers-only checkpoint is not named, or has layers alone too.
    """
    if not has_layers_alone(reference):
        return reference
    base = str(Path(reference) / _described(reference)["path"])
    if has_layers_alone(base):
        raise IncompatibleError(f"{reference} needs the embeddings of {base}, which has layers alone")
    return base


def save_layers(model: LlamaForCausalLM, num_masks: int, base: Path, out: Path) -> dict[str, str]:
    """Write a model without the token embeddings, which are those of `base`; returns the entry for `drafter.json`.

    The last `num_masks` embeddings are the model's own and are written.
    """
    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    tables: list[Tensor] = []
    for name, value in model.state_dict().items():
        if name in _TABLES:
            tables.append(value[: len(value) - num_masks])
            tensors[_MASKS + name] = value[len(value) - num_masks :].bfloat16().contiguous()
        elif name.startswith("model.layers.") and value.dim() == 2:
            weights = quantise(value.detach().float().cpu().numpy())
            tensors[name] = torch.from_numpy(weights.values)
            tensors[name + _SCALES] = torch.from_numpy(weights.scales)
        else:
            tensors[name] = value.bfloat16().contiguous()
    save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, out / LAYERS_FILE)
    model.config.save_pretrained(out)
    path = Path(os.path.relpath(base.resolve(), out.resolve()))
    return {"path": path.as_posix(), "embeddings": _digest(tables)}


def load_layers(reference: str, base: PreTrainedModel) -> LlamaForCausalLM:
    """Load a layers-only checkpoint in float32, with the embeddings of `base`.

    Raises:
        IncompatibleError: it is damaged, or belongs to other embeddings.
        OSError: it cannot be read.
    """
    described = _described(reference)
    try:
        config = AutoConfig.from_pretrained(reference, trust_remote_code=False)
        if not isinstance(config, LlamaConfig):
            raise IncompatibleError(f"{reference} is a {config.model_type}; checkpoints of layers alone are Llamas")
        model = LlamaForCausalLM(config)
        tensors = load_file(Path(reference) / LAYERS_FILE)
        _refuse_other_tensors(reference, tensors, model.state_dict())
        known = base.state_dict()
        tables = [known[name].float().cpu() for name in _TABLES if name in model.state_dict()]
        if _digest(tables) != described["embeddings"]:
            raise IncompatibleError(f"{reference} was made with other embeddings than those of {base_of(reference)}")
        model.load_state_dict(_whole(tensors, dict(zip(_TABLES, tables, strict=False)), set(model.state_dict())))
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise IncompatibleError(f"the layers of {reference} are damaged or do not fit: {error}") from error
    return model


def _refuse_other_tensors(reference: str, tensors: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are missing, unexpected, of other shapes than the model's, or not finite."""
    names = {_MASKS + name if name in _TABLES else name for name in model}
    scales = {name + _SCALES for name in names if name in tensors and not tensors[name].is_floating_point()}
    refuse_other_names(reference, tensors, names | scales, TRANSITION)
    wanted = {name: list(value.shape) for name, value in model.items() if name not in _TABLES}
    wanted |= {name: [len(tensors[name.removesuffix(_SCALES)])] for name in scales}
    other = [
        f"{name} {list(tensors[name].shape)} instead of {shape}"
        for name, shape in wanted.items()
        if list(tensors[name].shape) != shape
    ]
    if other:
        raise IncompatibleError(f"{reference} has {named(other, 'tensor')} of other shapes than config.json says")
    refuse_not_finite(reference, tensors.items())


def _whole(tensors: Mapping[str, Tensor], tables: Mapping[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    state = {}
    for name in names:
        if name in tables:
            state[name] = torch.cat([tables[name], tensors[_MASKS + name].float()])
        elif name + _SCALES in tensors:
            state[name] = tensors[name].float() * tensors[name + _SCALES][:, None]
        else:
            state[name] = tensors[name].float()
    return state


def _described(reference: str) -> dict[str, Any]:
    try:
        base = json.loads((Path(reference) / _DESCRIPTION_FILE).read_text())["base"]
        return {"path": str(base["path"]), "embeddings": str(base["embeddings"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IncompatibleError(f"{reference} has layers alone, and does not say whose embeddings it needs") from error


def _digest(tables: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for table in tables:
        digest.update(table.detach().cpu().bfloat16().contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
