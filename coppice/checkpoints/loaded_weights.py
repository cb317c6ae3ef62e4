"""Checks of a loaded model's tensors: all from the checkpoint, and all finite.

Libraries fill missing tensors with random numbers and only warn. Such a model is useless, so it is refused. Tensors
are torch's, but only methods are used: torch is not imported.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from coppice.checkpoints.files import named
from coppice.core.errors import IncompatibleError

# Tensors in checkpoints that models do not need, as they are derived or unused:
_HARMLESS = re.compile(
    "|".join(
        (
            # frequencies of rotary positions, which follow from config.json,
            r"(^|\.)inv_freq$",
            # causal masks and their value for minus infinity,
            r"\.(attn|attention|self_attn)\.(bias|masked_bias|causal_mask)$",
            # the numbers 0, 1, 2, ...,
            r"(^|\.)position_ids$",
            # and layers for multi-token prediction, unused by the model's own passes.
            r"(^|\.)mtp\.",
        )
    )
)
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
# Names of output layers, and of output layers and embeddings.
_OUTPUT = re.compile(r"(^|\.)(lm_head|embed_out|output)\.weight$")
_VOCABULARY = re.compile(r"(^|\.)(lm_head|embed_out|embed_tokens|wte|embed_in|word_embeddings)\.weight$")
_MERGE = "are these adapters? Merge them into their model first (peft: merge_and_unload, then save_pretrained)"
# Loggers of loading reports and of tensor-parallel sharding.
_WORDY = tuple(f"transformers.{place}.tensor_parallel" for place in ("distributed", "integrations"))
_WORDY += ("transformers.modeling_utils",)
# Numbers converted at once for data types without comparison.
_CHUNK = 1 << 22


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Silence the library's long reports of what `refuse_incomplete` checks."""
    wordy = [logging.getLogger(name) for name in _WORDY]
    levels = [each.level for each in wordy]
    for each in wordy:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in zip(wordy, levels, strict=True):
            each.setLevel(level)


def refuse_incomplete(
    model: str, found: Mapping[str, Any], expected: Collection[str], config: Any, own: Collection[str] = ()
) -> None:
    """Refuse a model with tensors from elsewhere than its checkpoint.

    `found` is the loading info of `from_pretrained` (with `output_loading_info` and `ignore_mismatched_sizes`);
    `expected` are the names of the model's tensors, and `config` is its text configuration. The checkpoint may also
    have tensors `own`, which other code reads.

    Raises:
        IncompatibleError: tensors are missing, unexpected, or of other shapes than configured.
    """
    missing = sorted(found["missing_keys"])
    unexpected = sorted(name for name in found["unexpected_keys"] if name not in own and not _is_harmless(name, config))
    if missing:
        raise IncompatibleError(
            f"{model} lacks {named(missing, 'tensor')} of its model{_why_missing(missing, unexpected, expected)}"
        )
    if unexpected:
        hint = _why_unexpected(unexpected, config)
        raise IncompatibleError(f"{model} has {named(unexpected, 'tensor')} that its model has no place for{hint}")
    if other := sorted(found["mismatched_keys"]):
        shapes = [f"{name} {list(stored)} instead of {list(wanted)}" for name, stored, wanted in other]
        # Their first dimension is the vocabulary.
        is_vocabulary = all(_VOCABULARY.search(name) and s[1:] == w[1:] for name, s, w in other)
        hint = ": does vocab_size of config.json belong to these weights?" if is_vocabulary else ""
        raise IncompatibleError(f"{model} has {named(shapes, 'tensor')} of other shapes than config.json says{hint}")


def refuse_untied(model: str, pairs: Iterable[tuple[str, Any, Any]]) -> None:
    """Refuse tensors that differ although the configuration ties them.

    `pairs` are the name of a tensor, the tensor, and the one it must be identical to.

    Raises:
        IncompatibleError: a pair differs.
    """
    differing = [name for name, tensor, other in pairs if tensor is not other]
    if differing:
        raise IncompatibleError(
            f"{model} has {named(differing, 'tensor')} other than the embeddings, though config.json ties them "
            "(tie_word_embeddings): set that to false if they are meant to differ"
        )


def refuse_other_names(what: str, found: Iterable[str], expected: Iterable[str], optional: Iterable[str] = ()) -> None:
    """Refuse tensors by name: all `expected` must be present, and only `optional` ones in addition.

    Raises:
        IncompatibleError: names are missing or unexpected; `what` begins the message.
    """
    names, wanted = set(found), set(expected)
    if missing := sorted(wanted - names):
        raise IncompatibleError(f"{what} lacks {named(missing, 'tensor')}")
    if unexpected := sorted(names - wanted - set(optional)):
        raise IncompatibleError(f"{what} has {named(unexpected, 'tensor')} that are not used")


def refuse_not_finite(what: str, tensors: Iterable[tuple[str, Any]]) -> None:
    """Refuse tensors with NaN or infinity.

    Raises:
        IncompatibleError: a tensor has some; `what` begins the message.
    """
    if bad := [name for name, tensor in tensors if not is_finite(tensor)]:
        raise IncompatibleError(not_finite(what, bad))


def not_finite(what: str, names: Sequence[str]) -> str:
    """Message for tensors with NaN or infinity."""
    return f"{what} has NaN or infinity in {named(list(names), 'tensor')}: they are damaged, or were so when saved"


def is_finite(tensor: Any) -> bool:
    """Whether all numbers are finite, in one pass without a copy."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if tensor.element_size() > 1:
        # Both are NaN if any number is.
        return all(math.isfinite(float(extreme)) for extreme in tensor.detach().aminmax())
    # One-byte types have no comparison.
    flat = tensor.detach().flatten()
    return all(is_finite(flat[start : start + _CHUNK].float()) for start in range(0, len(flat), _CHUNK))


def _is_harmless(name: str, config: Any) -> bool:
    if _HARMLESS.search(name):
        return True
    further = getattr(config, "num_nextn_predict_layers", None) or 0
    first = getattr(config, "num_hidden_layers", None)
    layer = _LAYER.search(name)
    # Layers after the model's own, for multi-token prediction.
    return layer is not None and first is not None and first <= int(layer[1]) < first + further


def _why_missing(missing: Sequence[str], unexpected: Sequence[str], expected: Collection[str]) -> str:
    if any("lora_" in name for name in unexpected):
        return f": {_MERGE}"
    if prefix := _common_prefix(missing, unexpected):
        is_adapter = prefix.startswith("base_model.")
        return f": all names begin with {prefix!r}: " + (
            _MERGE if is_adapter else "save the model that is inside the wrapper"
        )
    if all(_OUTPUT.search(name) for name in missing):
        return ": config.json does not tie it to the embeddings (tie_word_embeddings), and it was not saved"
    if layers := _whole_layers(missing, expected):
        numbers = ", ".join(map(str, layers[:5])) + (", ..." if len(layers) > 5 else "")
        return f": all of layer {numbers}: is a shard missing, or num_hidden_layers of config.json wrong?"
    return ""


def _why_unexpected(unexpected: Sequence[str], config: Any) -> str:
    if any("lora_" in name for name in unexpected):
        return f": {_MERGE}"
    own = getattr(config, "num_hidden_layers", None)
    layers = [_LAYER.search(name) for name in unexpected]
    if own is not None and all(layer is not None and int(layer[1]) >= own for layer in layers):
        return f": num_hidden_layers of config.json is {own}, and there are more layers"
    return ""


def _common_prefix(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Prefix of the names of all missing tensors in the checkpoint; empty without one."""
    stored = set(unexpected)
    for name in unexpected:
        if name.endswith(f".{missing[0]}"):
            prefix = name.removesuffix(missing[0])
            if all(prefix + other in stored for other in missing):
                return prefix
    return ""


def _whole_layers(missing: Sequence[str], expected: Collection[str]) -> list[int]:
    """Layers without any tensor; empty if other tensors are missing too."""
    lacking = set(missing)
    layers = {int(found[1]) if (found := _LAYER.search(name)) else -1 for name in missing}
    if -1 in layers:
        return []
    of_layers = [(name, int(found[1])) for name in expected if (found := _LAYER.search(name))]
    return sorted(layer for layer in layers if all(name in lacking for name, at in of_layers if at == layer))
