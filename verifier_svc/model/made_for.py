"""The target that an adapter or an early head was trained for, by a digest of some of its weights.

Beside another target it changes no token, but drafts badly or prunes what is right: worth a warning, and no more, since
it may still fit a target that was tuned a little.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import torch
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

FILE = "target.json"
# Numbers of a tensor that are looked at, evenly spaced: enough to tell any two trained models apart.
_NUMBERS = 256


def weights_digest(model: PreTrainedModel) -> str:
    """A digest of names, shapes and some numbers of a model's weights; the same in any precision from bfloat16 on."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().flatten()
        some = flat[:: max(1, len(flat) // _NUMBERS)][:_NUMBERS].to("cpu", torch.bfloat16)
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(some.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def write_target(directory: Path, model: PreTrainedModel) -> None:
    """Say in a directory for which target its content was trained."""
    (directory / FILE).write_text(json.dumps({"weights": weights_digest(model)}) + "\n")


def is_made_for(directory: Path, model: PreTrainedModel) -> bool:
    """Whether a directory's content was trained for this target, or does not say for which; warns where it was not."""
    try:
        expected = json.loads((directory / FILE).read_text())["weights"]
    except FileNotFoundError:
        return True
    except (OSError, ValueError, TypeError, KeyError):
        logger.warning("%s does not say for which target it was trained", directory / FILE)
        return True
    fits: bool = expected == weights_digest(model)
    if not fits:
        logger.warning("%s was trained for another target: it changes no token, and may be of little use", directory)
    return fits
