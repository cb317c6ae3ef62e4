"""Checkpoint of a feature-conditioned drafter: heads on the target's hidden states, and a trunk that they correct.

The trunk is the checkpoint of a token-only drafter, used unchanged and not copied. The directory has
`features.safetensors`, the heads' matrices in 8 bits with a scale per output, and in `drafter.json` the trunk's path
and the digest of its weights.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, from_numpy
from transformers import PreTrainedModel

from coppice.checkpoints.loaded_weights import refuse_not_finite, refuse_other_names
from coppice.core.errors import IncompatibleError
from drafter_svc.drafters.features.heads import FeatureHeads, FloatArray
from drafter_svc.kernels.cpu.int8_weights import quantise
from drafter_svc.model.checkpoint import CALIBRATION_FILE
from drafter_svc.model.layers_checkpoint import LAYERS_FILE

FEATURES_FILE = "features.safetensors"
_WEIGHTS_FILES = (LAYERS_FILE, "model.safetensors")
_NAMES = ("of_feature", "of_token", "up")
_SCALES = ".scales"


@dataclass(frozen=True, slots=True)
class Conditioning:
    """Extension of a token-only drafter: path of its checkpoint, and the heads' matrices by name."""

    trunk: str
    matrices: Mapping[str, FloatArray]

    def heads_on(self, model: PreTrainedModel) -> FeatureHeads:
        """Heads for the trunk's model.

        Raises:
            IncompatibleError: they do not match it.
        """
        embed: Any = model.get_input_embeddings()
        embeddings = embed.weight.detach().float().cpu().numpy()
        try:
            return FeatureHeads(**self.matrices, embeddings=embeddings)
        except ValueError as error:
            raise IncompatibleError(f"the heads do not fit {self.trunk}: {error}") from error


def save_matrices(matrices: Mapping[str, FloatArray], out: Path) -> None:
    """Write the heads' matrices to a directory."""
    tensors: dict[str, Tensor] = {}
    for name in _NAMES:
        weights = quantise(matrices[name])
        tensors[name] = from_numpy(weights.values)
        tensors[name + _SCALES] = from_numpy(weights.scales)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / FEATURES_FILE)


def load_conditioning(reference: str) -> Conditioning:
    """Load a checkpoint's heads and the path of its trunk.

    Raises:
        IncompatibleError: it is damaged, or its trunk is a different one.
    """
    try:
        tensors = load_file(Path(reference) / FEATURES_FILE)
        refuse_other_names(f"{FEATURES_FILE} of {reference}", tensors, [*_NAMES, *(name + _SCALES for name in _NAMES)])
        refuse_not_finite(f"{FEATURES_FILE} of {reference}", tensors.items())
        matrices = {name: (tensors[name].float() * tensors[name + _SCALES][..., None]).numpy() for name in _NAMES}
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise IncompatibleError(f"{reference} has no {FEATURES_FILE} that can be used: {error}") from error
    return Conditioning(_trunk_of(reference), matrices)


def trunk_reference(trunk: Path, out: Path) -> dict[str, str]:
    """Description of a trunk in `drafter.json` of `out`."""
    path = Path(os.path.relpath(trunk.resolve(), out.resolve()))
    return {"path": path.as_posix(), "weights": _digest(trunk)}


def _trunk_of(reference: str) -> str:
    try:
        described: Any = json.loads((Path(reference) / CALIBRATION_FILE).read_text())["trunk"]
        path, digest = str(described["path"]), str(described["weights"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IncompatibleError(f"{reference} does not say which drafter's layers it needs") from error
    trunk = Path(reference) / path
    if _digest(trunk) != digest:
        raise IncompatibleError(f"{reference} was made for other layers than those of {trunk}")
    return str(trunk)


def _digest(trunk: Path) -> str:
    for name in _WEIGHTS_FILES:
        if (trunk / name).is_file():
            return hashlib.sha256((trunk / name).read_bytes()).hexdigest()
    raise IncompatibleError(f"{trunk} has neither {' nor '.join(_WEIGHTS_FILES)}")
