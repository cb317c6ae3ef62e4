"""Activation functions with the same bits for an element at any place of its tensor.

A library computes most of a tensor with vector instructions and the remainder with scalar code that rounds
differently; a large tensor has a remainder in every thread's part. An element's bits would thus depend on the other
rows. Where that is possible, calls get a whole number of vectors, and too few of them for several threads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Elements of two of the widest vectors, one step of the library's loops.
_STEP = 32
# Largest size that no function of the library splits among threads; a multiple of the step.
_PIECE = 16_384
# Most functions use one more thread per this many elements, others always use all.
_GRAIN = 32_768
_LIBRARIES = ("torch.nn.modules.activation", "transformers.activations")


class EvenActivation(nn.Module):
    """An elementwise function called without remainders."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        # Not as a submodule: its hooks are not needed, and cost as much as a small call.
        self._function = function.forward

    def forward(self, values: Tensor) -> Tensor:
        """`values` of any shape to the same shape."""
        return evenly(self._function, values)


def evenly(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """An elementwise function of `values` of any shape, called without remainders."""
    size = values.numel()
    if _is_even(size):
        return function(values)
    flat = F.pad(values.flatten(), (0, -size % _STEP))
    pieces = torch.cat([function(piece) for piece in flat.split(_PIECE)])
    return pieces[:size].view(values.shape)


def _is_even(size: int) -> bool:
    """Whether every thread's part of so many elements is whole vectors."""
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
