"""The numbers that a target is served in, and the fingerprints of weights and of serving.

Two deployments with one fingerprint of weights have the same checkpoint: what was made for it, drafters and adapters,
belongs to both. Those with one fingerprint of serving compute with the same numbers by the same rules, too: what one of
them said, the other goes on with.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Literal

import torch
from transformers import AutoConfig, PreTrainedModel

from verifier_svc.model.made_for import weights_digest

logger = logging.getLogger(__name__)

DtypeName = Literal["auto", "float32", "bfloat16"]


def chosen_dtype(
    wanted: DtypeName, device: torch.device, model: str, *, is_gguf: bool, may_multiply: bool
) -> torch.dtype:
    """The numbers that a checkpoint is served in.

    `auto` is bfloat16 on GPUs, and on a CPU for checkpoints in bfloat16 and GGUF files where the processor multiplies
    such numbers and may (`may_multiply`).
    """
    if wanted != "auto":
        return torch.float32 if wanted == "float32" else torch.bfloat16
    if device.type != "cpu":
        return torch.bfloat16
    if not may_multiply or not multiplies_bfloat16():
        return torch.float32
    stored = AutoConfig.from_pretrained(model, trust_remote_code=False).get_text_config().dtype
    return torch.bfloat16 if is_gguf or stored == torch.bfloat16 else torch.float32


def multiplies_bfloat16() -> bool:
    """Whether the processor has an instruction for products of bfloat16, and layers can be compiled for it."""
    try:
        # Here, so that everything else works where Numba is not installed.
        from coppice.kernels.cpu.vector_code import MULTIPLIES_HALVES
    except ImportError:
        return False
    return MULTIPLIES_HALVES


@torch.no_grad()
def round_weights(model: PreTrainedModel) -> None:
    """Round a model's weights to bfloat16, in place; they stay in single precision, in which they are computed with."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


def weights_fingerprint(model: PreTrainedModel, tokenizer_fingerprint: str) -> str:
    """The fingerprint of a checkpoint's weights and tokenizer, whatever it is served in.

    A rank has that of its part, which is the same for as many ranks.
    """
    return _digest(weights_digest(model), tokenizer_fingerprint)


def serving_fingerprint(weights: str, dtype: torch.dtype, *, exact: bool) -> str:
    """The fingerprint of what an output depends on beside a request."""
    return _digest(weights, name_of(dtype), "strict" if exact else "fast")


def name_of(dtype: torch.dtype) -> str:
    """A dtype as settings name it."""
    return str(dtype).removeprefix("torch.")


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
