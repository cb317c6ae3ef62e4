"""Loading a drafter's checkpoint, and choice of the fastest forward pass with the model's own logits."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from numba.core.errors import NumbaError
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from coppice.checkpoints.files import (
    CALIBRATION_FILE,
    WEIGHTS_FILE,
    read_object,
    reason_of,
    refusal_of,
    refuse_unsuitable,
    refuse_without_tokenizer,
)
from coppice.checkpoints.loaded_weights import quiet_loading, refuse_incomplete, refuse_not_finite, refuse_untied
from coppice.core.errors import IncompatibleError
from coppice.core.tokenizer import fingerprint, load_tokenizer_json
from drafter_svc.model.hf_forward import CachedForward, PlainForward
from drafter_svc.model.layers_checkpoint import LAYERS_FILE, TRANSITION, base_of, has_layers_alone, load_layers
from drafter_svc.model.llama_forward import LlamaForward, compiled_ways, is_supported
from drafter_svc.model.tree_cache import FloatArray, Forward, TreeCache

logger = logging.getLogger(__name__)

# Largest accepted difference of logits, relative to the largest logit (at least 1).
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
INT8_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measurements of a checkpoint.

    `sigmas` are pairs of temperature and scale of log-probability errors, in nats, lowest temperature first. `context`
    is the number of tokens that it was trained for; 0 if unknown.
    """

    sigmas: tuple[tuple[float, float], ...] = ((0.0, 1.0),)
    acceptance_by_rank: tuple[float, ...] = ()
    context: int = 0

    def sigma_at(self, temperature: float) -> float:
        """Sigma at a temperature, interpolated linearly; the nearest one beyond those measured."""
        temperatures, sigmas = zip(*self.sigmas, strict=True)
        return float(np.interp(temperature, temperatures, sigmas))


def choose_device(name: str) -> torch.device:
    """Device of the setting DEVICE.

    Raises:
        IncompatibleError: the device does not exist.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise IncompatibleError("DEVICE is cuda, but torch finds no CUDA device")
    if name == "auto":
        name = "cuda" if available else "cpu"
    return torch.device(name)


def load_model(reference: str, device: torch.device) -> PreTrainedModel:
    """Load the model of a checkpoint directory or hub id: float32 on a CPU, bfloat16 on a GPU, safetensors only.

    Raises:
        IncompatibleError: the checkpoint does not exist, could carry code, or is not a supported causal language model;
            its tensors are damaged, do not match the model, or are not finite; or it has layers alone and belongs to
            other embeddings.
    """
    refuse_unsuitable(reference, transformers, LAYERS_FILE if has_layers_alone(reference) else WEIGHTS_FILE)
    transformers_logging.disable_progress_bar()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if has_layers_alone(reference):
        base = load_model(base_of(reference), torch.device("cpu"))
        whole: Any = load_layers(reference, base)
        return cast(PreTrainedModel, whole.to(device, dtype).eval())
    try:
        with quiet_loading():
            read: Any = AutoModelForCausalLM.from_pretrained(
                reference,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except MemoryError:
        raise
    except Exception as error:
        # Of many types, by the cause.
        raise refusal_of(reference, error) from error
    model, found = read
    tensors: dict[str, Any] = model.state_dict()
    refuse_incomplete(reference, found, tensors.keys(), model.config.get_text_config(), TRANSITION)
    tied = model.get_expanded_tied_weights_keys(all_submodels=True).items()
    refuse_untied(reference, [(name, model.get_parameter(name), model.get_parameter(other)) for name, other in tied])
    refuse_not_finite(reference, tensors.items())
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


def load_fingerprint(reference: str) -> str:
    """Fingerprint of a checkpoint's tokenizer.

    Raises:
        IncompatibleError: the tokenizer is missing, damaged, or cannot be compared.
    """
    reference = base_of(reference)
    refuse_without_tokenizer(reference)
    if (path := Path(reference) / "tokenizer.json").is_file():
        read_object(path)
        return fingerprint(load_tokenizer_json(Path(reference)))
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(reference, trust_remote_code=False)
    except Exception as error:
        # Of many types, by the cause.
        raise IncompatibleError(f"the tokenizer of {reference} cannot be loaded: {reason_of(error)}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise IncompatibleError(f"the checkpoint {reference} has no tokenizer.json and none can be made")
    return fingerprint(backend.to_str().encode())


def load_calibration(reference: str) -> Calibration:
    """Read `drafter.json` of a checkpoint directory; defaults without it.

    Raises:
        IncompatibleError: the file is invalid.
    """
    path = Path(reference) / CALIBRATION_FILE
    if not path.is_file():
        return Calibration()
    content = read_object(path)
    try:
        sigmas = sorted((float(key), float(value)) for key, value in content.get("sigmas", {"0": 1.0}).items())
        shares = tuple(float(value) for value in content.get("acceptance_by_rank", ()))
        context = int(content.get("context", 0))
    except (ValueError, TypeError, AttributeError) as error:
        raise IncompatibleError(f"{path}: {error}") from error
    if not sigmas or not all(sigma > 0 and math.isfinite(sigma) for _, sigma in sigmas):
        raise IncompatibleError(f"{path}: sigmas must be finite numbers above 0, got {sigmas}")
    if context < 0:
        raise IncompatibleError(f"{path}: context must be at least 0, got {context}")
    return Calibration(tuple(sigmas), shares, context)


def choose_forward(model: PreTrainedModel) -> Forward[Any]:
    """The first of the lean, cached and plain forwards whose logits on a small tree agree with the plain model's."""
    plain = PlainForward(model)
    expected = probe(plain)
    bound = TOLERANCES.get(model.dtype, 1e-3) * max(1.0, float(np.abs(expected).max()))
    candidates: list[type[LlamaForward] | type[CachedForward]] = [CachedForward]
    if is_supported(model):
        candidates.insert(0, LlamaForward)
    for kind in candidates:
        try:
            forward: Forward[Any] = _build(kind, model)
            deviation = float(np.abs(probe(forward) - expected).max())
        # Errors of models that do not accept our mask or cache; others are bugs of ours.
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as error:
            logger.warning("%s does not work for this model: %s", kind.__name__, error)
            continue
        if deviation <= bound:
            logger.info("forward pass: %s, off by at most %.2g", kind.__name__, deviation)
            return _with_few_rows(forward, model, expected)
        logger.warning("%s is off by %.2g, more than %.2g", kind.__name__, deviation, bound)
    logger.warning("forward pass: PlainForward, which computes every path from its first token")
    return plain


def _with_few_rows(forward: Forward[Any], model: PreTrainedModel, expected: FloatArray) -> Forward[Any]:
    """The pass with compiled 8-bit steps for few rows, if that works and is close enough; else the given one.

    Drafts are hints: a logit off by a few hundredths may cost a little acceptance, never a wrong token.
    """
    if not isinstance(forward, LlamaForward) or model.dtype != torch.float32 or model.device.type != "cpu":
        return forward
    assert isinstance(model, LlamaForCausalLM)
    bound = INT8_TOLERANCE * max(1.0, float(np.abs(expected).max()))
    # A compiler that fails on this processor, or has no place for its files, must not stop the service.
    try:
        for way in compiled_ways():
            compiled = LlamaForward(model, way)
            deviation = float(np.abs(probe(compiled) - expected).max())
            if deviation <= bound:
                logger.info("compiled draft steps (%s), off by at most %.2g", way, deviation)
                return compiled
            logger.warning("compiled draft steps (%s) are off by %.2g, more than %.2g", way, deviation, bound)
    except (NumbaError, RuntimeError, OSError) as error:
        logger.warning("compiling draft steps failed: %s", error)
    logger.warning("draft steps are not compiled and slower")
    return forward


def probe(forward: Forward[Any]) -> FloatArray:
    """Logits [rows, vocab] of a short prompt, a tree after it, and of the continuation after keeping part of it."""
    tokens = np.random.default_rng(0).integers(0, forward.vocab_size, 16).tolist()
    # Siblings must have different tokens.
    first, second = 0, 1
    cache = TreeCache(forward)
    logits = [cache.extend(tokens[:6])[None]]
    logits.append(cache.grow([first, second, tokens[6]], [-1, -1, -1], [1, 1, 1]))
    logits.append(cache.grow([second, first], [1, 0], [2, 2]))
    logits.append(cache.grow([tokens[7]], [3], [3]))
    cache.follow([second, second])
    logits.append(cache.extend(tokens[8:11])[None])
    logits.append(cache.grow([first, second], [-1, -1], [1, 1]))
    return np.concatenate(logits)


def _build(kind: type[LlamaForward] | type[CachedForward], model: PreTrainedModel) -> Forward[Any]:
    if kind is LlamaForward:
        assert isinstance(model, LlamaForCausalLM)
        return LlamaForward(model)
    return CachedForward(model)
