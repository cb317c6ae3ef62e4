"""Re-draft adapter: embeddings of masks, and low-rank additions to the target's layers for mask rows only.

A directory with `space.json` and `space.safetensors`. The tensors are `masks` [K, hidden], one embedding per position
after the last token, and for layers of the target, by name, `NAME.down` [rank, in] and `NAME.up` [out, rank]. Optional
`transition.before` and `transition.behind` [rank, hidden] project the target's embeddings of two neighbouring tokens;
the dot product of the projections is added to the masks' scores of the second token once the first is known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from coppice.checkpoints.files import refuse_special_files
from coppice.checkpoints.loaded_weights import refuse_not_finite, refuse_other_names
from coppice.core.errors import IncompatibleError
from coppice.search.error_scales import ErrorScales, check_error_scales, read_error_scales

DESCRIPTION_FILE = "space.json"
TENSOR_FILE = "space.safetensors"
KIND = "space"
TRANSITION = ("transition.before", "transition.behind")
# Upper bound, more than pay in any round.
MAX_MASKS = 16


@dataclass(frozen=True, slots=True)
class LowRank:
    """Addition to a layer's output: up [out, rank] times down [rank, in] times its input."""

    down: Tensor
    up: Tensor

    def __post_init__(self) -> None:
        if self.down.dim() != 2 or self.up.dim() != 2 or self.down.shape[0] != self.up.shape[1]:
            raise ValueError(f"down {tuple(self.down.shape)} and up {tuple(self.up.shape)} do not fit together")

    def to(self, device: torch.device, dtype: torch.dtype) -> LowRank:
        """Copy on a device, in a dtype."""
        return LowRank(self.down.to(device, dtype), self.up.to(device, dtype))


@dataclass(frozen=True, slots=True)
class Transition:
    """Matrices `before` and `behind` [rank, hidden], see `TransitionScores.of_embeddings`."""

    before: Tensor
    behind: Tensor

    def __post_init__(self) -> None:
        if self.before.dim() != 2 or self.behind.dim() != 2 or len(self.before) != len(self.behind):
            raise ValueError(f"before {tuple(self.before.shape)} and behind {tuple(self.behind.shape)} do not fit")


@dataclass(frozen=True, slots=True)
class SpaceAdapter:
    """`masks` [K, hidden]; `low_rank` by layer name; `sigmas` by temperature and position, see `error_scales`.

    Raises:
        ValueError: shapes do not match.
    """

    masks: Tensor
    low_rank: Mapping[str, LowRank]
    sigmas: ErrorScales
    transition: Transition | None = None

    def __post_init__(self) -> None:
        if self.masks.dim() != 2 or not 1 <= len(self.masks) <= MAX_MASKS:
            raise ValueError(f"masks must be 1 to {MAX_MASKS} rows of numbers, got {tuple(self.masks.shape)}")
        check_error_scales(self.sigmas)

    @property
    def num_masks(self) -> int:
        """Largest number of masks of a group."""
        return len(self.masks)


def load_adapter(directory: Path) -> SpaceAdapter:
    """Load the adapter in a directory.

    Raises:
        IncompatibleError: missing or damaged.
    """
    refuse_special_files(str(directory))
    try:
        content = json.loads((directory / DESCRIPTION_FILE).read_text())
        if content.get("kind") != KIND:
            raise IncompatibleError(f"{directory / DESCRIPTION_FILE} is not that of an adapter of the kind {KIND!r}")
        tensors = load_file(directory / TENSOR_FILE)
        names = {name.removesuffix(".down").removesuffix(".up") for name in tensors if name.endswith((".down", ".up"))}
        own = [*TRANSITION] if set(TRANSITION) & tensors.keys() else []
        own += [f"{name}{side}" for name in names for side in (".down", ".up")]
        refuse_other_names(str(directory / TENSOR_FILE), tensors, ["masks", *own])
        refuse_not_finite(str(directory / TENSOR_FILE), tensors.items())
        masks = tensors["masks"]
        transition = Transition(*(tensors[name] for name in TRANSITION)) if TRANSITION[0] in tensors else None
        low_rank = {name: LowRank(tensors[f"{name}.down"], tensors[f"{name}.up"]) for name in sorted(names)}
        return SpaceAdapter(masks, low_rank, read_error_scales(content["sigmas"]), transition)
    except (OSError, SafetensorError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise IncompatibleError(f"{directory} has no adapter that can be used: {error!r}") from error


def save_adapter(adapter: SpaceAdapter, directory: Path) -> None:
    """Write an adapter to a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {"masks": adapter.masks}
    for name, low_rank in adapter.low_rank.items():
        tensors |= {f"{name}.down": low_rank.down, f"{name}.up": low_rank.up}
    if (pair := adapter.transition) is not None:
        tensors |= dict(zip(TRANSITION, (pair.before, pair.behind), strict=True))
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, directory / TENSOR_FILE)
    sigmas = {f"{temperature:g}": scales for temperature, scales in adapter.sigmas}
    (directory / DESCRIPTION_FILE).write_text(json.dumps({"kind": KIND, "sigmas": sigmas}) + "\n")
