"""EAGLE-3 checkpoint, as `speculators` writes it: `config.json`, `model.safetensors`, and our `drafter.json`.

Tables of the vocabulary may be left out: they are then the target's (`target_rows.py`). A foreign checkpoint has no
`drafter.json`, and defaults are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from coppice.checkpoints.files import (
    CALIBRATION_FILE,
    WEIGHTS_FILE,
    read_config,
    read_object,
    reason_of,
    refuse_special_files,
)
from coppice.checkpoints.loaded_weights import refuse_not_finite, refuse_other_names
from coppice.core.errors import IncompatibleError
from coppice.core.feature_layers import default_feature_layers
from coppice.draft_models.eagle.target_rows import TargetRows
from coppice.search.error_scales import ErrorScales, check_error_scales, read_error_scales

KIND = "eagle"
_LAYER = "layers.0."
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_TO_DRAFT, _TO_TARGET = "t2d", "d2t"
# Rotary factors that depend on the length of the text have no table.
_FIXED_ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class EagleCalibration:
    """Measurements of a checkpoint.

    `sigmas` are the scales of log-probability errors by temperature and depth, in nats; `target` is the weights
    fingerprint of the target that it was made for, empty if unknown. `reads_prompt`: trained with rows of prompts.
    """

    sigmas: ErrorScales = ((0.0, (1.0,)),)
    acceptance_by_rank: tuple[float, ...] = ()
    target: str = ""
    reads_prompt: bool = True

    def __post_init__(self) -> None:
        check_error_scales(self.sigmas)


@dataclass(frozen=True, slots=True)
class EagleHeads:
    """Query heads and key heads of a layer, of `size` numbers each.

    Raises:
        ValueError: query heads do not divide among key heads, or heads have no halves.
    """

    queries: int
    keys: int
    size: int

    def __post_init__(self) -> None:
        if min(self.queries, self.keys, self.size) < 1 or self.queries % self.keys or self.size % 2:
            raise ValueError(f"{self.queries} query heads of {self.size} numbers on {self.keys} key heads")


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """Weights in single precision, except for the tables of the vocabulary in bfloat16.

    Axes: h hidden, V vocabulary, N draft vocabulary, F numbers of a feature, I inner, H query heads, K key heads of D.
    """

    config: LlamaConfig
    heads: EagleHeads
    feature_layers: tuple[int, ...]
    norm_before_residual: bool
    # Of features [F]; None without it.
    feature_norm: Tensor | None
    # [h, F].
    fusion: Tensor
    # All [h].
    token_norm: Tensor
    state_norm: Tensor
    mlp_norm: Tensor
    norm: Tensor
    # [(H + 2K) * D, 2h], [h, H * D], [2I, h] and [h, I].
    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    # [V, h], and [N, h] of the tokens `draft_ids` [N].
    embedding: Tensor
    head: Tensor
    draft_ids: Tensor
    # The output layer [V, h] that the head's rows are from; None if not at hand.
    target_output: Tensor | None
    calibration: EagleCalibration = field(default_factory=EagleCalibration)

    @property
    def feature_size(self) -> int:
        """Numbers of a feature."""
        return int(self.fusion.shape[1])

    @property
    def vocab_size(self) -> int:
        """Tokens of the target."""
        return len(self.embedding)


def load_eagle_calibration(reference: str) -> EagleCalibration:
    """Read the checkpoint's `drafter.json`; defaults without it.

    Raises:
        IncompatibleError: the file is invalid, or of another kind of drafter.
    """
    path = Path(reference) / CALIBRATION_FILE
    if not path.is_file():
        return EagleCalibration()
    content = read_object(path)
    if (kind := content.get("kind")) != KIND:
        raise IncompatibleError(f"{path} is that of a drafter of the kind {kind!r}, not {KIND!r}")
    reads_prompt = content.get("reads_prompt", True)
    try:
        if not isinstance(reads_prompt, bool):
            raise ValueError(f"reads_prompt is {reads_prompt!r}, and must be true or false")
        return EagleCalibration(
            read_error_scales(content.get("sigmas", {"0": [1.0]})),
            tuple(map(float, content.get("acceptance_by_rank", ()))),
            str(content.get("target", "")),
            reads_prompt,
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise IncompatibleError(f"{path}: {error}") from error


def load_eagle(reference: str, target: TargetRows | None) -> EagleWeights:
    """Load a checkpoint; `target` has the tables that it leaves out.

    Raises:
        IncompatibleError: a setting is missing or not supported, tensors are missing, unknown, of another shape or not
            finite, the draft vocabulary is not part of the target's, or tables are missing.
    """
    refuse_special_files(reference)
    calibration = load_eagle_calibration(reference)
    settings = read_config(reference)
    if (kind := settings.get("speculators_model_type")) != "eagle3":
        raise IncompatibleError(f"config.json of {reference} is of {kind!r}, and speculators_model_type must be eagle3")
    config, heads = _layer_config(reference, settings.get("transformer_layer_config"))
    layers = _feature_layers(reference, settings.get("eagle_aux_hidden_state_layer_ids"), target)
    hidden = config.hidden_size
    feature_size = len(layers) * int(settings.get("target_hidden_size") or hidden)
    norms_features = bool(settings.get("norm_before_fc", False))
    shapes = _shapes(config, heads, feature_size, norms_features=norms_features)
    try:
        tensors = load_file(Path(reference) / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise IncompatibleError(f"{WEIGHTS_FILE} of {reference} cannot be read: {error}") from error
    what = f"{WEIGHTS_FILE} of {reference}"
    is_whole = settings.get("draft_vocab_size") == config.vocab_size
    needed, optional = ([], [_TO_TARGET]) if is_whole else ([_TO_TARGET], [])
    refuse_other_names(what, tensors, [*shapes, *needed], [_TO_DRAFT, _EMBEDDING, _HEAD, *optional])
    refuse_not_finite(what, tensors.items())
    _check_shapes(what, tensors, shapes)
    _check_rope(reference, config)
    ids = _draft_ids(what, tensors, settings.get("draft_vocab_size"), config.vocab_size)
    if target is not None and len(target.embedding) != config.vocab_size:
        raise IncompatibleError(
            f"{reference} is for a vocabulary of {config.vocab_size}, and the target has {len(target.embedding)}"
        )
    embedding = _table(
        what, tensors, _EMBEDDING, (config.vocab_size, hidden), None if target is None else target.embedding
    )
    fits = target is not None and target.output.shape[1] == hidden
    target_output = target.output if target is not None and fits else None
    own = None if target_output is None else target_output.index_select(0, ids)
    head = _table(what, tensors, _HEAD, (len(ids), hidden), own)
    # A head of its own scores other tokens by another measure.
    is_targets = own is not None and torch.equal(head, own)

    def part(name: str) -> Tensor:
        return tensors[_LAYER + name].float()

    return EagleWeights(
        config=config,
        heads=heads,
        feature_layers=layers,
        norm_before_residual=bool(settings.get("norm_before_residual", False)),
        feature_norm=tensors["input_norm.weight"].float() if norms_features else None,
        fusion=tensors["fc.weight"].float(),
        token_norm=part("input_layernorm.weight"),
        state_norm=part("hidden_norm.weight"),
        mlp_norm=part("post_attention_layernorm.weight"),
        norm=tensors["norm.weight"].float(),
        qkv=torch.cat([part(f"self_attn.{name}_proj.weight") for name in "qkv"]),
        output=part("self_attn.o_proj.weight"),
        gate_up=torch.cat([part("mlp.gate_proj.weight"), part("mlp.up_proj.weight")]),
        down=part("mlp.down_proj.weight"),
        embedding=embedding,
        head=head,
        draft_ids=ids,
        target_output=target_output if is_targets else None,
        calibration=calibration,
    )


def _layer_config(reference: str, settings: Any) -> tuple[LlamaConfig, EagleHeads]:
    what = f"transformer_layer_config of {reference}"
    if not isinstance(settings, dict):
        raise IncompatibleError(f"config.json of {reference} has no transformer_layer_config")
    if (kind := settings.get("model_type", "llama")) != "llama":
        raise IncompatibleError(f"{what} is of a {kind} layer, and only those of llama are supported")
    if (layers := settings.get("num_hidden_layers", 1)) != 1:
        raise IncompatibleError(f"{what} has {layers} layers, and one is supported")
    if (activation := settings.get("hidden_act", "silu")) != "silu":
        raise IncompatibleError(f"{what} has the activation {activation}, and only silu is supported")
    try:
        config = LlamaConfig(**{**settings, "num_hidden_layers": 1})
        rope: Any = config.rope_parameters
        heads = EagleHeads(config.num_attention_heads, int(config.num_key_value_heads or 0), int(config.head_dim or 0))
    except Exception as error:
        # Of many types, by the setting.
        raise IncompatibleError(f"{what} cannot be used: {reason_of(error)}") from error
    if (kind := rope.get("rope_type", "default")) not in _FIXED_ROPES:
        raise IncompatibleError(f"{what} has rope of type {kind}, whose factors depend on the length")
    return config, heads


def _feature_layers(reference: str, given: Any, target: TargetRows | None) -> tuple[int, ...]:
    if given is None:
        if target is None:
            raise IncompatibleError(f"{reference} does not say which layers it reads: TARGET_MODEL is needed for that")
        return default_feature_layers(target.num_layers)
    if not isinstance(given, list) or not given or not all(type(layer) is int and layer >= 0 for layer in given):
        raise IncompatibleError(f"{reference} reads layers {given!r}, which are no numbers of layers")
    if target is not None and max(given) > target.num_layers:
        raise IncompatibleError(f"{reference} reads layer {max(given)}, and the target has {target.num_layers}")
    return tuple(given)


def _shapes(
    config: LlamaConfig, heads: EagleHeads, feature_size: int, *, norms_features: bool
) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor that must be there, besides the draft vocabulary."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = heads.queries * heads.size, heads.keys * heads.size
    norms = [f"{_LAYER}{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, feature_size),
        "norm.weight": (hidden,),
        **dict.fromkeys(norms, (hidden,)),
        f"{_LAYER}self_attn.q_proj.weight": (queries, 2 * hidden),
        f"{_LAYER}self_attn.k_proj.weight": (keys, 2 * hidden),
        f"{_LAYER}self_attn.v_proj.weight": (keys, 2 * hidden),
        f"{_LAYER}self_attn.o_proj.weight": (hidden, queries),
        f"{_LAYER}mlp.gate_proj.weight": (inner, hidden),
        f"{_LAYER}mlp.up_proj.weight": (inner, hidden),
        f"{_LAYER}mlp.down_proj.weight": (hidden, inner),
    }
    return {**shapes, "input_norm.weight": (feature_size,)} if norms_features else shapes


def _check_shapes(what: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tensor.shape != shape or not tensor.is_floating_point():
            found = f"{list(tensor.shape)} of {tensor.dtype}"
            raise IncompatibleError(f"{what}: {name} is {found}, and config.json says {list(shape)}")


def _check_rope(reference: str, config: LlamaConfig) -> None:
    """Refuse rotary positions without frequencies; after `_check_shapes`, as their number is the head's size."""
    what = f"transformer_layer_config of {reference}"
    try:
        frequencies = LlamaRotaryEmbedding(config).inv_freq
    except Exception as error:
        # Of many types, by the setting.
        raise IncompatibleError(f"{what} has rope that cannot be used: {reason_of(error)}") from error
    if not bool(torch.isfinite(frequencies).all()) or float(frequencies.min()) < 0:
        raise IncompatibleError(f"{what} has rope whose frequencies are no finite numbers of at least 0")


def _draft_ids(what: str, tensors: Mapping[str, Tensor], size: Any, vocab_size: int) -> Tensor:
    """Target ids of the draft vocabulary [N]."""
    offsets = tensors.get(_TO_TARGET, torch.zeros(vocab_size, dtype=torch.int64))
    if offsets.dim() != 1 or offsets.is_floating_point() or len(offsets) != size:
        raise IncompatibleError(f"{what}: d2t is {list(offsets.shape)}, and draft_vocab_size is {size}")
    ids = torch.arange(len(offsets)) + offsets.long()
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < len(ids):
        raise IncompatibleError(
            f"{what}: the draft vocabulary has tokens twice, or others than the target's {vocab_size}"
        )
    if (back := tensors.get(_TO_DRAFT)) is not None:
        expected = torch.zeros(vocab_size, dtype=torch.bool)
        expected[ids] = True
        if not torch.equal(back.bool(), expected):
            raise IncompatibleError(f"{what}: t2d and d2t are of different vocabularies")
    return ids


def _table(what: str, tensors: Mapping[str, Tensor], name: str, shape: tuple[int, int], other: Tensor | None) -> Tensor:
    table = tensors[name].bfloat16() if name in tensors else other
    if table is None:
        raise IncompatibleError(f"{what} has no {name}: TARGET_MODEL must name the target's checkpoint")
    if table.shape != shape:
        raise IncompatibleError(f"{what}: {name} is {list(table.shape)}, and {list(shape)} is needed")
    return table
