"""Dtype in which a target is served, and fingerprints of weights and of serving.

Deployments with the same weights fingerprint have the same checkpoint, so drafters and adapters trained for one fit the
other. Those with the same serving fingerprint also compute with the same numbers by the same rules: outputs begun on
one continue on the other.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Literal

import torch
from transformers import AutoConfig, PreTrainedModel

from coppice.checkpoints.gguf import is_converted
from coppice.kernels.cpu.vector_code import MULTIPLIES_HALVES
from verifier_svc.model.made_for import weights_digest

logger = logging.getLogger(__name__)

DtypeName = Literal["auto", "float32", "bfloat16"]


def chosen_dtype(wanted: DtypeName, device: torch.device, model: str, *, may_multiply: bool) -> torch.dtype:
    """Dtype in which a checkpoint is served.

    `auto` is bfloat16 on GPUs, and on a CPU for checkpoints in bfloat16 and converted GGUF files if the processor has
    bfloat16 products and `may_multiply` allows them.
    """
    if wanted != "auto":
        return torch.float32 if wanted == "float32" else torch.bfloat16
    if device.type != "cpu":
        return torch.bfloat16
    if not may_multiply or not multiplies_bfloat16():
        return torch.float32
    if is_converted(model):
        return torch.bfloat16
    stored = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config().dtype
    return torch.bfloat16 if stored == torch.bfloat16 else torch.float32


def multiplies_bfloat16() -> bool:
    """Whether the processor has bfloat16 dot products, and layers can be compiled for them."""
    return MULTIPLIES_HALVES


@torch.no_grad()
def round_weights(model: PreTrainedModel) -> None:
    """Round a model's weights to bfloat16, in place; they remain in single precision for computation."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


def weights_fingerprint(model: PreTrainedModel, tokenizer_fingerprint: str) -> str:
    """Fingerprint of a checkpoint's weights and tokenizer, independent of the serving dtype.

    A rank's covers its part, and is the same for equal numbers of ranks.
    """
    return _digest(weights_digest(model), tokenizer_fingerprint)


def serving_fingerprint(weights: str, dtype: torch.dtype, quantization: str, *, exact: bool) -> str:
    """Fingerprint of all that an output depends on besides the request."""
    return _digest(weights, name_of(dtype), quantization, "strict" if exact else "fast")


def name_of(dtype: torch.dtype) -> str:
    """Name of a dtype as in settings."""
    return str(dtype).removeprefix("torch.")


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
