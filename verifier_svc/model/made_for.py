"""The target that an adapter or an early head was trained for, identified by a digest of some of its weights.

With another target it changes no token, but drafts badly or prunes wrong nodes: only a warning, since it may still fit
a slightly tuned target.
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
# Sampled numbers per tensor, evenly spaced: enough to tell trained models apart.
_NUMBERS = 256


def weights_digest(model: PreTrainedModel) -> str:
    """Digest of names, shapes and some numbers of a model's weights; the same in any precision from bfloat16 on."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        # With tensor parallelism a rank has its part; nothing else imports the class of such tensors.
        part = weight.to_local() if hasattr(weight, "to_local") else weight
        flat = part.detach().flatten()
        some = flat[:: max(1, len(flat) // _NUMBERS)][:_NUMBERS].to("cpu", torch.bfloat16)
        digest.update(f"{name} {tuple(part.shape)}".encode())
        digest.update(some.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def write_target(directory: Path, model: PreTrainedModel) -> None:
    """Write the digest of the target that a directory's content was trained for."""
    (directory / FILE).write_text(json.dumps({"weights": weights_digest(model)}) + "\n")


def is_made_for(directory: Path, model: PreTrainedModel) -> bool:
    """Whether a directory's content was trained for this target, or has no digest; warns if it was not."""
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
