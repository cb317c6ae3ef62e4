"""Linear layers with weights packed once for oneDNN: a row costs the same alone and beside a few others.

PyTorch's fp32 matrix product on CPUs costs 1.4 to 1.6 times as much for two rows as for one; with packed weights
eight rows cost about 1.1 times one row, which is what makes a small tree nearly free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

logger = logging.getLogger(__name__)

# Rows [..., in] to [..., out].
Product: TypeAlias = Callable[[Tensor], Tensor]

# Packing for 16 rows serves every number of rows equally well.
_ROWS_HINT = 16
# Largest relative difference to the plain product that still counts as rounding.
_TOLERANCE = 1e-4


class PackedLinear(nn.Module):
    """Inference-only replacement for a float32 `nn.Linear` on CPU."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        # Kept for code that looks at `weight` (tied embeddings, dtype and device checks).
        self.weight = linear.weight
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)
        # Another product with the same weights and the same bits, and for up to how many rows it is taken.
        self._few_rows: Product | None = None
        self.num_few_rows = 0
        # What follows every product and may change its result in place: a hook, without what calling hooks costs.
        self.addition: Callable[[Tensor, Tensor], None] | None = None

    def prefer(self, product: Product, num_rows: int) -> None:
        """Take products of up to so many rows from elsewhere; they have to have the same bits."""
        self._few_rows, self.num_few_rows = product, num_rows

    def forward(self, rows: Tensor) -> Tensor:
        """`rows` [..., in_features] to [..., out_features]."""
        if self._few_rows is not None and rows.numel() <= self.num_few_rows * self.in_features:
            result = self._few_rows(rows)
        else:
            result = self._packed_product(rows)
        if self.addition is not None:
            self.addition(rows, result)
        return result

    def _packed_product(self, rows: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return result


def pack_linears(model: nn.Module) -> int:
    """Replace every plain float32 `nn.Linear` of `model`; returns how many were replaced.

    The packing operators are private to PyTorch. Each layer is compared with the plain product once, and stays as it
    is when the operators are missing or disagree.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # A part of a weight that several processes hold is no plain parameter, and its layer adds up their results.
            if type(child) is not nn.Linear or type(child.weight) is not nn.Parameter:
                continue
            if child.weight.dtype != torch.float32:
                continue
            packed = _try_pack(child)
            if packed is None:
                return replaced
            setattr(parent, name, packed)
            replaced += 1
    return replaced


@torch.inference_mode()
def prepare_rows(model: nn.Module, num_rows: int) -> None:
    """Have oneDNN's machine code for so many rows: one product for every shape of packed weights."""
    for layer in one_of_each_shape(model):
        layer(layer.weight.new_zeros(num_rows, layer.in_features))


def one_of_each_shape(model: nn.Module) -> list[PackedLinear]:
    """One packed layer for every shape of weights, and for every way in which products with it are made."""
    return [layers[0] for layers in layers_by_shape(model)]


def layers_by_shape(model: nn.Module) -> list[list[PackedLinear]]:
    """Packed layers, those together that differ in the numbers of their weights alone."""
    shapes: dict[tuple[int, int, bool, int], list[PackedLinear]] = {}
    for layer in packed_layers(model):
        shape = layer.in_features, layer.out_features, layer.bias is None, layer.num_few_rows
        shapes.setdefault(shape, []).append(layer)
    return list(shapes.values())


def packed_layers(model: nn.Module) -> list[PackedLinear]:
    """The layers of `model` that are packed."""
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


@torch.inference_mode()
def _try_pack(linear: nn.Linear) -> PackedLinear | None:
    rows = torch.linspace(-1, 1, 4 * linear.in_features).reshape(4, linear.in_features)
    try:
        packed = PackedLinear(linear)
        difference = (packed(rows) - F.linear(rows, linear.weight, linear.bias)).abs().max().item()
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        logger.warning("packed linear layers are not available, decoding is slower: %s", error)
        return None
    scale = rows.abs().sum(-1).max().item() * linear.weight.abs().max().item()
    if difference > _TOLERANCE * scale:
        logger.warning("packed linear layer differs by %.2e, decoding stays on the plain product", difference)
        return None
    return packed
