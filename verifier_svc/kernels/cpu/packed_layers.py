"""Linear layers with packed weights, see `coppice/kernels/cpu/packed_linear.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from coppice.kernels.cpu.packed_linear import Product, packed_product

# Classes of linear layers that write the product otherwise.
_LIKE_LINEAR = frozenset({"FalconLinear"})


class PackedLinear(nn.Module):
    """Inference-only replacement for a float32 `nn.Linear` on CPU."""

    def __init__(self, linear: nn.Linear, product: Product) -> None:
        """`product` is the packed product with the layer's weight and bias."""
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        # For code that reads `weight` (tied embeddings, dtype and device checks).
        self.weight = linear.weight
        self.bias = linear.bias
        self.product = product
        # Another product with the same weights and bits, and the largest number of rows for which it is used.
        self._few_rows: Product | None = None
        self.num_few_rows = 0
        # Called after every product, may change its result in place: a hook without the overhead of hooks.
        self.addition: Callable[[Tensor, Tensor], None] | None = None

    def prefer(self, product: Product, num_rows: int) -> None:
        """Use another product for up to `num_rows` rows; its bits must be the same."""
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


# Product with a float32 layer's weight and bias; None where there is none.
Pack: TypeAlias = Callable[[nn.Linear | PackedLinear], Product | None]


def packed_for_onednn(layer: nn.Linear | PackedLinear) -> Product | None:
    """Product in single precision with weights packed for oneDNN."""
    return packed_product(layer.weight, layer.bias)


def pack_linears(model: nn.Module, pack: Pack = packed_for_onednn) -> int:
    """Replace every plain float32 `nn.Linear` of `model`, with products by `pack`; returns the number replaced.

    Packed layers get new products. Stops at the first layer without a product.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # A tensor-parallel weight is not a plain parameter, and its layer sums over ranks.
            if not isinstance(child, PackedLinear) and not _is_plain(child):
                continue
            if type(child.weight) is not nn.Parameter or child.weight.dtype != torch.float32:
                continue
            product = pack(child)
            if product is None:
                return replaced
            if isinstance(child, PackedLinear):
                child.product = product
            else:
                setattr(parent, name, PackedLinear(child, product))
            replaced += 1
    return replaced


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer and nothing else."""
    return type(module) is nn.Linear or type(module).__name__ in _LIKE_LINEAR


@torch.inference_mode()
def prepare_rows(model: nn.Module, num_rows: int) -> None:
    """Let oneDNN generate machine code for `num_rows` rows: one product per shape of packed weights."""
    for layer in one_of_each_shape(model):
        layer(torch.zeros(num_rows, layer.in_features))


def one_of_each_shape(model: nn.Module) -> list[PackedLinear]:
    """One packed layer per shape of weights and kind of product."""
    return [layers[0] for layers in layers_by_shape(model)]


def layers_by_shape(model: nn.Module) -> list[list[PackedLinear]]:
    """Packed layers, grouped by shape of weights and kind of product."""
    shapes: dict[tuple[int, int, bool, int], list[PackedLinear]] = {}
    for layer in packed_layers(model):
        shape = layer.in_features, layer.out_features, layer.bias is None, layer.num_few_rows
        shapes.setdefault(shape, []).append(layer)
    return list(shapes.values())


def packed_layers(model: nn.Module) -> list[PackedLinear]:
    """Packed layers of `model`."""
    return [module for module in model.modules() if isinstance(module, PackedLinear)]
