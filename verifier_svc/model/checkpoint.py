"""Loads a target's checkpoint, requiring all tensors of the model, and its tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from coppice.checkpoints.files import is_of_merging, reason_of, refusal_of, refuse_without_tokenizer
from coppice.checkpoints.loaded_weights import is_finite, not_finite, quiet_loading, refuse_incomplete, refuse_untied
from coppice.core.errors import IncompatibleError
from verifier_svc.model.parallel.sharded_target import Ranks

logger = logging.getLogger(__name__)


class CheckpointRefusedError(IncompatibleError):
    """The checkpoint does not match its model; all ranks find it, and one reports it."""


def load_checkpoint(model: str, dtype: torch.dtype, device: torch.device, ranks: Ranks | None) -> PreTrainedModel:
    """Load the model of a checkpoint accepted by `refuse_unsuitable` to `device`; with `ranks` this process's part.

    Raises:
        CheckpointRefusedError: missing or extra tensors, shapes that differ from the configuration, NaN or infinity, or
        an
            unreadable file.
    """
    try:
        with quiet_loading():
            loaded, found = _read(model, dtype, ranks)
    except (IncompatibleError, MemoryError):
        raise
    except RuntimeError as error:
        # Usually another rank is gone.
        if ranks is not None and not is_of_merging(error):
            raise
        raise CheckpointRefusedError(str(refusal_of(model, error))) from error
    except Exception as error:  # the type depends on the defect
        raise CheckpointRefusedError(str(refusal_of(model, error))) from error
    try:
        refuse_incomplete(model, found, loaded.state_dict().keys(), loaded.config.get_text_config())
        if ranks is None:
            refuse_untied(model, _tied(loaded))
    except IncompatibleError as error:
        raise CheckpointRefusedError(str(error)) from error
    torch.nn.Module.to(loaded, device)
    _refuse_not_finite(model, loaded, ranks)
    loaded.eval()
    return loaded


@dataclass(frozen=True, slots=True)
class CheckpointTokenizer:
    """A tokenizer, serialised as `tokenizer.json`, with the chat template and the texts of special tokens by name."""

    json: bytes
    # Empty if the checkpoint has none.
    chat_template: str
    special_tokens: Mapping[str, str]


def read_tokenizer(model: str) -> CheckpointTokenizer:
    """Read the checkpoint's tokenizer.

    Raises:
        IncompatibleError: missing, damaged, or without a fast form.
    """
    refuse_without_tokenizer(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:
        # The type depends on the defect.
        raise IncompatibleError(f"the tokenizer of {model} cannot be loaded: {reason_of(error)}") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise IncompatibleError(f"the tokenizer of {model} has no fast form (tokenizer.json)")
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("default")
    special = {name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    return CheckpointTokenizer(backend.to_str().encode(), template or "", special)


def refuse_larger_tokenizer(model: str, tokenizer: bytes, vocab_size: int) -> None:
    """Refuse a tokenizer of another model, with tokens for which this one has no embeddings.

    Added tokens without embeddings are common: only requests that contain them are refused.

    Raises:
        IncompatibleError: the tokenizer's own vocabulary has ids not below `vocab_size`.
    """
    parsed = Tokenizer.from_buffer(tokenizer)
    added = parsed.get_added_tokens_decoder().keys()
    largest = max(parsed.get_vocab(with_added_tokens=False).values(), default=-1)
    if largest >= vocab_size:
        raise IncompatibleError(
            f"the tokenizer of {model} has ids up to {largest}, and the model's vocabulary {vocab_size}: is it that of "
            "another model?"
        )
    if beyond := sorted(token for token in added if token >= vocab_size):
        logger.warning("the tokenizer has added tokens that the model does not know: %s", beyond[:5])


def _read(model: str, dtype: torch.dtype, ranks: Ranks | None) -> tuple[PreTrainedModel, dict[str, Any]]:
    if ranks is not None:
        # Imported here, so that nothing else depends on torch.distributed.
        from verifier_svc.model.parallel.tensor_parallel import load_part

        return load_part(model, dtype, ranks)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    read, found = loaded
    return read, found


def _tied(model: PreTrainedModel) -> list[tuple[str, Any, Any]]:
    """Tensors that the configuration ties, in pairs."""
    pairs: dict[str, str] = model.get_expanded_tied_weights_keys(all_submodels=True)
    return [(name, model.get_parameter(name), model.get_parameter(other)) for name, other in pairs.items()]


def _refuse_not_finite(model: str, loaded: PreTrainedModel, ranks: Ranks | None) -> None:
    """Check all tensors; ranks, with parts of the same tensors, share the result."""
    named = [(name, tensor) for name, tensor in loaded.state_dict().items() if tensor.is_floating_point()]
    bad = [not is_finite(tensor) for _, tensor in named]
    if ranks is not None:
        # Imported here, so that nothing else depends on torch.distributed.
        from verifier_svc.model.parallel.tensor_parallel import on_any_rank

        bad = on_any_rank(bad, next(loaded.parameters()).device)
    if any(bad):
        names = [name for (name, _), is_bad in zip(named, bad, strict=True) if is_bad]
        raise CheckpointRefusedError(not_finite(model, names))
