"""Rotary embeddings whose factors depend on a text's length, made a property of each row.

With `longrope` (Phi-3, Phi-4-mini, PhiMoE) a text of more than `original_max_position_embeddings` tokens has long
factors at all positions, a shorter one short factors. transformers chooses one set for a whole pass, by its largest
position, which is right for one sequence without a cache and wrong for a batch. Here each row has the factors of its
own text: position ids of rows with long factors are raised by LONG_OFFSET, see pass_plan.py.

With `dynamic` (NTK) factors change with every token past the trained length, and the module keeps them for later
passes. Here they are those of the trained length, and texts end there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coppice.core.errors import IncompatibleError
from verifier_svc.engine.pass_plan import LONG_OFFSET

# For models without a largest position in their configuration.
_NO_POSITION_LIMIT = 1 << 20

# Cosines and sines [1, N, dim] as a pair, or combined as complex numbers.
Rotation = TypeVar("Rotation", Tensor, tuple[Tensor, ...])


class RowwiseRotary(nn.Module):
    """Replaces a rotary module whose factors depend on the largest position of a pass.

    `boundary` is the length up to which texts have short factors; None if all have the same. `trained_length` is the
    length up to which the checkpoint's factors apply; None without a limit.
    """

    def __init__(self, rotary: nn.Module) -> None:
        """Copy a module of rope type `longrope` or `dynamic`, with its own choice of factors disabled.

        Raises:
            IncompatibleError: the layers have several boundaries.
        """
        super().__init__()
        self.boundary = _boundary(rotary)
        self.trained_length = _trained_length(rotary)
        self.short = _fixed_copy(rotary, 0)
        self.long = None if self.boundary is None else _fixed_copy(rotary, self.boundary)

    def forward(self, x: Tensor, position_ids: Tensor, *arguments: Any, **keywords: Any) -> Any:
        """Rotation of each row by the factors of its own text; `position_ids` are [..., N]."""
        if self.long is None:
            return self.short(x, position_ids, *arguments, **keywords)
        is_long = position_ids >= LONG_OFFSET
        # On a GPU this would synchronize, and a captured pass has to compute both.
        if not is_long.is_cuda and not is_long.any():
            return self.short(x, position_ids, *arguments, **keywords)
        positions = torch.where(is_long, position_ids - LONG_OFFSET, position_ids)
        short, long = (module(x, positions, *arguments, **keywords) for module in (self.short, self.long))
        return _chosen(is_long[..., None], long, short)


def make_rotary_rowwise(model: PreTrainedModel) -> int | None:
    """Replace a model's rotary modules whose factors depend on the pass; a no-op when repeated.

    Returns the length up to which texts have short factors; None if all texts have the same.

    Raises:
        IncompatibleError: there are several such lengths.
    """
    replaced: dict[int, RowwiseRotary] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if _depends_on_length(module):
            rowwise = replaced.setdefault(id(module), RowwiseRotary(module))
            model.set_submodule(name, rowwise)
    return _only({module.boundary for module in model.modules() if isinstance(module, RowwiseRotary)} - {None})


def trained_length(model: PreTrainedModel) -> int | None:
    """Tokens up to which rope of type `dynamic` has the checkpoint's factors; None for other models."""
    lengths = [
        module.trained_length if isinstance(module, RowwiseRotary) else _trained_length(module)
        for module in model.modules()
    ]
    return min((length for length in lengths if length is not None), default=None)


def position_limit(model: PreTrainedModel) -> int:
    """Largest number of tokens of a text."""
    config = model.config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len")
    stated = next((limit for name in names if (limit := getattr(config, name, None))), _NO_POSITION_LIMIT)
    trained = trained_length(model)
    return stated if trained is None else min(stated, trained)


def _kinds(module: nn.Module) -> Iterator[tuple[str | None, str]]:
    """Layer types, None if all layers are alike, with their rope types; nothing for other modules."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        yield None, kinds
    elif isinstance(kinds, dict):
        yield from kinds.items()


def _depends_on_length(module: nn.Module) -> bool:
    return any(kind == "longrope" or "dynamic" in kind for _, kind in _kinds(module))


def _boundary(rotary: Any) -> int | None:
    parameters = rotary.config.rope_parameters
    return _only(
        {
            (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]
            for layer_type, kind in _kinds(rotary)
            if kind == "longrope"
        }
    )


def _trained_length(module: Any) -> int | None:
    if any("dynamic" in kind for _, kind in _kinds(module)):
        length: int = module.original_max_seq_len
        return length
    return None


def _only(boundaries: set[int | None]) -> int | None:
    if len(boundaries) > 1:
        raise IncompatibleError(f"rope factors change at several lengths: {sorted(map(str, boundaries))}")
    return next(iter(boundaries), None)


@torch.no_grad()
def _fixed_copy(rotary: nn.Module, position: int) -> Any:
    """A copy that always has the factors of a pass up to `position`."""
    fixed: Any = copy.deepcopy(rotary)
    device = next(rotary.buffers()).device
    x, positions = torch.zeros(1, 1, 1, device=device), torch.tensor([[position]], device=device)
    for layer_type, _ in _kinds(rotary):
        fixed(x, positions, **({} if layer_type is None else {"layer_type": layer_type}))
    # Disables the choice of factors in forwards.
    if isinstance(fixed.rope_type, dict):
        fixed.rope_type = dict.fromkeys(fixed.rope_type, "default")
    else:
        fixed.rope_type = "default"
        parameters = fixed.config.rope_parameters
        # PhiMoE's own module also chooses the scale of cosines and sines by the largest position.
        if "long_mscale" in parameters and position:
            parameters["short_mscale"] = parameters["long_mscale"]
        elif "long_mscale" in parameters:
            parameters["long_mscale"] = parameters["short_mscale"]
    return fixed


def _chosen(is_first: Tensor, first: Rotation, second: Rotation) -> Rotation:
    """Rows of `first` where `is_first` [..., N, 1], else of `second`."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.where(is_first, first, second)
    return tuple(torch.where(is_first, one, other) for one, other in zip(first, second, strict=True))
