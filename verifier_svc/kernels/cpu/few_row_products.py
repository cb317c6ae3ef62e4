"""Choice between bfloat16 panels and oneDNN for products of a few rows, by speed.

Both give the same bits, or panels are not used: a row's bits must not depend on the number of rows. Speed depends on
the processor, on the threads of a pass (panels use one) and on the weights' shape, so it is measured while loading.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from coppice.kernels.cpu.half_tables import halves
from coppice.kernels.cpu.packed_linear import Product
from coppice.kernels.cpu.vector_code import HAS_FUSED
from verifier_svc.kernels.cpu.packed_layers import PackedLinear, layers_by_shape
from verifier_svc.kernels.cpu.panel_products import multiply, packed_panels

LastFaster: TypeAlias = Callable[[Mapping[PackedLinear, Product], Callable[[int], None]], int]

logger = logging.getLogger(__name__)

# Measured numbers of rows, up to the first at which panels are slower.
_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48)
_REPEATS = 3
# Size of measured weights: exceeds nearer caches, as those of a whole pass do.
_MEASURED_BYTES = 64 * 2**20
# Tried lengths of oneDNN's chains of additions; 0 is the whole sum.
_CHAINS = (0, 1024, 512)
_TRIED_ROWS = (2, 3, 8, 17)


@torch.inference_mode()
def prefer_panels(
    model: nn.Module, set_threads_for: Callable[[int], None], last_faster: LastFaster | None = None
) -> int:
    """Let packed layers compute products of a few rows from panels if that is faster; returns their number.

    Panels take half as many bytes as the weights. `set_threads_for` sets the threads of a pass of so many rows.
    `last_faster` gives the number of rows up to which products are faster than their layers' own; by default measured.
    """
    last_faster = last_faster or _last_faster
    if not HAS_FUSED:
        return 0
    num_preferred = 0
    for layers in layers_by_shape(model):
        alike = [layer for layer in layers if holds_exactly(layer.weight.detach())]
        if not alike:
            continue
        set_threads_for(max(_TRIED_ROWS))
        first = PanelProduct(alike[0], 0)
        if not _finds_chain(first, alike[0]):
            continue
        enough = -(-_MEASURED_BYTES // max(1, alike[0].weight.nbytes))
        products = {alike[0]: first} | {layer: PanelProduct(layer, first.chain) for layer in alike[1:enough]}
        limit = last_faster(products, set_threads_for)
        shape = f"{first.num_inputs} x {first.num_outputs}"
        logger.info("products of up to %d rows with %s weights use panels", limit, shape)
        if not limit:
            continue
        products |= {layer: PanelProduct(layer, first.chain) for layer in alike[enough:]}
        for layer, product in products.items():
            layer.prefer(product, limit)
        num_preferred += len(products)
    return num_preferred


class PanelProduct:
    """Product of rows with one layer's weights, which must be exact in bfloat16.

    `chain` is the number of factors added up from zero.
    """

    def __init__(self, layer: PackedLinear, chain: int) -> None:
        self.chain = chain
        self.num_inputs, self.num_outputs = layer.in_features, layer.out_features
        self._panels = packed_panels(halves(layer.weight.detach().numpy()))
        self._biases = np.empty(0, np.float32) if layer.bias is None else layer.bias.detach().numpy()

    def __call__(self, rows: Tensor) -> Tensor:
        """`rows` [..., in] to [..., out]."""
        result = torch.empty(*rows.shape[:-1], self.num_outputs)
        inputs, outputs = rows.contiguous().numpy(), result.numpy()
        if rows.dim() != 2:
            inputs, outputs = inputs.reshape(-1, self.num_inputs), outputs.reshape(-1, self.num_outputs)
        multiply(inputs, self._panels, self.chain, self._biases, outputs)
        return result


def holds_exactly(weight: Tensor) -> bool:
    """Whether every number of a weight is exact in bfloat16."""
    return torch.equal(weight.bfloat16().float(), weight)


def _finds_chain(product: PanelProduct, layer: PackedLinear) -> bool:
    """Set the product's chain to oneDNN's for weights of this shape; false if none gives the same bits."""
    generator = torch.Generator().manual_seed(layer.in_features)
    rows = torch.randn(max(_TRIED_ROWS), layer.in_features, generator=generator)
    expected = [layer(rows[:size]) for size in _TRIED_ROWS]
    for length in _CHAINS:
        product.chain = length or layer.in_features
        if all(torch.equal(product(rows[: len(known)]), known) for known in expected):
            return True
    logger.info("oneDNN's order of additions is unknown: products of a few rows use oneDNN")
    return False


def _last_faster(products: Mapping[PackedLinear, Product], set_threads_for: Callable[[int], None]) -> int:
    """Largest of `_SIZES` up to which these products are faster than the layers' own; 0 for none."""
    limit = 0
    for size in _SIZES:
        set_threads_for(size)
        rows = torch.zeros(size, next(iter(products)).in_features)
        own, panels = [*products], [*products.values()]
        # Alternating, and the minimum of each: other load only adds time.
        times = [(_duration_s(own, rows), _duration_s(panels, rows)) for _ in range(_REPEATS)]
        own_s, panels_s = (min(column) for column in zip(*times, strict=True))
        if panels_s > own_s:
            break
        limit = size
    return limit


def _duration_s(products: Sequence[Product], rows: Tensor) -> float:
    started_s = time.perf_counter()
    for product in products:
        product(rows)
    return time.perf_counter() - started_s
