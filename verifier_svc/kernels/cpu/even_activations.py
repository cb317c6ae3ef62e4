"""Activation functions that give an element the same bits wherever it stands in its tensor.

A library computes most of a tensor with vector instructions and what is left over, element by element, with other code
that rounds otherwise; and a large tensor is left over at the end of every thread's part. So an element's bits would
depend on the rows beside its own. Where that would be so, each call gets a whole number of vectors, and too few of them
for several threads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Elements of two of the widest vectors, which a step of the library's loops takes.
_STEP = 32
# Up to so many elements no function of the library is shared by threads; a multiple of the step.
_PIECE = 16_384
# Most functions give a further thread a part for each of so many elements, and others give every thread one.
_GRAIN = 32_768
_LIBRARIES = ("torch.nn.modules.activation", "transformers.activations")


class EvenActivation(nn.Module):
    """An elementwise function that leaves nothing over."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        # Not as a submodule: its hooks are of no use here, and cost as much as a small call.
        self._function = function.forward

    def forward(self, values: Tensor) -> Tensor:
        """`values` of any shape to the same shape."""
        size = values.numel()
        if _is_even(size):
            result: Tensor = self._function(values)
            return result
        flat = F.pad(values.flatten(), (0, -size % _STEP))
        pieces = torch.cat([self._function(piece) for piece in flat.split(_PIECE)])
        return pieces[:size].view(values.shape)


def _is_even(size: int) -> bool:
    """Whether so many elements are whole vectors, for every thread that may get a part."""
    if size <= _PIECE:
        return size % _STEP == 0
    threads = torch.get_num_threads()
    return size % (_STEP * threads) == 0 == size % (_STEP * min(threads, -(-size // _GRAIN)))


def even_activations(model: nn.Module) -> int:
    """Replace every activation module of `model`; returns how many were replaced."""
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__module__ in _LIBRARIES:
                setattr(parent, name, EvenActivation(child))
                replaced += 1
    return replaced
