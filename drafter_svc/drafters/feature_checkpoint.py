"""A checkpoint of a feature-conditioned drafter: what features add, and which trunk it is added to.

The trunk is another checkpoint, used as it is: a token-only drafter whose layers are not copied. The directory has
`features.safetensors`, matrices in 8 bits with a scale for each output, and in `drafter.json` the trunk's place and the
digest of its weights.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from coppice.errors import IncompatibleError
from drafter_svc.drafters.checkpoint import CALIBRATION_FILE
from drafter_svc.drafters.feature_inputs import FeatureInputs
from drafter_svc.drafters.int8_weights import quantise
from drafter_svc.drafters.layers_checkpoint import LAYERS_FILE

FEATURES_FILE = "features.safetensors"
_WEIGHTS_FILES = (LAYERS_FILE, "model.safetensors")
_NAMES = ("token", "down", "up")
_SCALES = ".scales"


def save_feature_inputs(inputs: FeatureInputs, out: Path) -> None:
    """Write the matrices to a directory."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name in _NAMES:
        weights = quantise(getattr(inputs, name))
        tensors[name] = torch.from_numpy(weights.values)
        tensors[name + _SCALES] = torch.from_numpy(weights.scales)
    save_file(tensors, out / FEATURES_FILE)


def load_feature_inputs(reference: str) -> FeatureInputs:
    """The matrices of a checkpoint.

    Raises:
        IncompatibleError: there are none, or they are damaged.
    """
    try:
        tensors = load_file(Path(reference) / FEATURES_FILE)
        return FeatureInputs(*(_matrix(tensors[name], tensors[name + _SCALES]) for name in _NAMES))
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise IncompatibleError(f"{reference} has no {FEATURES_FILE} that can be used: {error}") from error


def trunk_reference(trunk: Path, out: Path) -> dict[str, str]:
    """What `drafter.json` in `out` says of a trunk."""
    path = Path(os.path.relpath(trunk.resolve(), out.resolve()))
    return {"path": path.as_posix(), "weights": _digest(trunk)}


def trunk_of(reference: str) -> str:
    """Where the trunk of a checkpoint is.

    Raises:
        IncompatibleError: the checkpoint does not say, or the trunk is not the one that it was made for.
    """
    try:
        described = json.loads((Path(reference) / CALIBRATION_FILE).read_text())["trunk"]
        path, digest = str(described["path"]), str(described["weights"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IncompatibleError(f"{reference} does not say which drafter's layers it needs") from error
    trunk = Path(reference) / path
    if _digest(trunk) != digest:
        raise IncompatibleError(f"{reference} was made for other layers than those of {trunk}")
    return str(trunk)


def _matrix(values: torch.Tensor, scales: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    matrix: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = (values.float() * scales[..., None]).numpy()
    return matrix


def _digest(trunk: Path) -> str:
    for name in _WEIGHTS_FILES:
        if (trunk / name).is_file():
            return hashlib.sha256((trunk / name).read_bytes()).hexdigest()
    raise IncompatibleError(f"{trunk} has neither {' nor '.join(_WEIGHTS_FILES)}")
