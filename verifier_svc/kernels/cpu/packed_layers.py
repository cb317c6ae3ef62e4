"""Linear layers of a model whose weights are packed, see `coppice/kernels/cpu/packed_linear.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from coppice.kernels.cpu.packed_linear import Product, packed_product


class PackedLinear(nn.Module):
    """Inference-only replacement for a float32 `nn.Linear` on CPU."""

    def __init__(self, linear: nn.Linear, product: Product) -> None:
        """`product` is the packed one with the layer's weight and bias."""
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        # Kept for code that looks at `weight` (tied embeddings, dtype and device checks).
        self.weight = linear.weight
        self.bias = linear.bias
        self.product = product
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
            result = self.product(rows)
        if self.addition is not None:
            self.addition(rows, result)
        return result


def pack_linears(model: nn.Module) -> int:
    """Replace every plain float32 `nn.Linear` of `model`; returns how many were replaced.

    Layers stay as they are from the first one on that has no packed product.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # A part of a weight that several processes hold is no plain parameter, and its layer adds up their results.
            if type(child) is not nn.Linear or type(child.weight) is not nn.Parameter:
                continue
            if child.weight.dtype != torch.float32:
                continue
            product = packed_product(child.weight, child.bias)
            if product is None:
                return replaced
            setattr(parent, name, PackedLinear(child, product))
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
