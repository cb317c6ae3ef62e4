"""The choice between bfloat16 panels and oneDNN for products of a few rows: the faster one.

Both give the same bits, or panels are not used at all: a row's bits may not depend on how many rows share its pass.
What is faster depends on the processor, on how many threads a pass has (panels have one) and on the shape of the
weights, so it is measured while loading, for each shape.
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
from verifier_svc.kernels.cpu.packed_layers import PackedLinear, layers_by_shape

LastFaster: TypeAlias = Callable[[Mapping[PackedLinear, Product], Callable[[int], None]], int]

logger = logging.getLogger(__name__)

# Numbers of rows that are measured, up to the first at which panels are slower.
_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48)
_REPEATS = 3
# Weights that are measured: as many as leave nearer caches to memory, as those of a whole pass do.
_MEASURED_BYTES = 64 * 2**20
# How many products oneDNN adds up from zero on, in the order in which they are tried; 0 is all of them.
_CHAINS = (0, 1024, 512)
_TRIED_ROWS = (2, 3, 8, 17)


@torch.inference_mode()
def prefer_panels(
    model: nn.Module, set_threads_for: Callable[[int], None], last_faster: LastFaster | None = None
) -> int:
    """Give packed layers products of a few rows from panels, where they are faster; returns to how many.

    Panels take half as many bytes as the weights themselves. `set_threads_for` has as many threads as a pass of so many
    rows has. `last_faster` says to how many rows products are faster than those of the layers that they are for; by
    default this is measured.
    """
    last_faster = last_faster or _last_faster
    try:
        # Here, so that everything else works where Numba is not installed.
        from coppice.kernels.cpu.vector_code import HAS_FUSED
    except ImportError as error:
        logger.warning("products of a few rows are oneDNN's, and slower: %s", error)
        return 0
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
        logger.info("products of up to %d rows with %s weights are taken from panels", limit, shape)
        if not limit:
            continue
        products |= {layer: PanelProduct(layer, first.chain) for layer in alike[enough:]}
        for layer, product in products.items():
            layer.prefer(product, limit)
        num_preferred += len(products)
    return num_preferred


class PanelProduct:
    """The product of rows with one layer's weights, which bfloat16 holds exactly.

    `chain` is how many factors are added up from zero on.
    """

    def __init__(self, layer: PackedLinear, chain: int) -> None:
        # Here, so that everything else works where Numba is not installed.
        from verifier_svc.kernels.cpu.panel_products import multiply, packed_panels

        self.chain = chain
        self.num_inputs, self.num_outputs = layer.in_features, layer.out_features
        self._multiply = multiply
        self._panels = packed_panels(halves(layer.weight.detach().numpy()))
        self._biases = np.empty(0, np.float32) if layer.bias is None else layer.bias.detach().numpy()

    def __call__(self, rows: Tensor) -> Tensor:
        """`rows` [..., in] to [..., out]."""
        result = torch.empty(*rows.shape[:-1], self.num_outputs)
        inputs, outputs = rows.contiguous().numpy(), result.numpy()
        if rows.dim() != 2:
            inputs, outputs = inputs.reshape(-1, self.num_inputs), outputs.reshape(-1, self.num_outputs)
        self._multiply(inputs, self._panels, self.chain, self._biases, outputs)
        return result


def holds_exactly(weight: Tensor) -> bool:
    """Whether every number of a weight is one in bfloat16, too."""
    return torch.equal(weight.bfloat16().float(), weight)


def _finds_chain(product: PanelProduct, layer: PackedLinear) -> bool:
    """Give a layer's product chains as long as oneDNN's are with weights of this shape, if it has any."""
    generator = torch.Generator().manual_seed(layer.in_features)
    rows = torch.randn(max(_TRIED_ROWS), layer.in_features, generator=generator)
    expected = [layer(rows[:size]) for size in _TRIED_ROWS]
    for length in _CHAINS:
        product.chain = length or layer.in_features
        if all(torch.equal(product(rows[: len(known)]), known) for known in expected):
            return True
    logger.info("oneDNN adds products up in an order of its own: few rows' are taken from it")
    return False


def _last_faster(products: Mapping[PackedLinear, Product], set_threads_for: Callable[[int], None]) -> int:
    """Of `_SIZES`, the last one up to which these products are faster than the layers' own; 0 if none is."""
    limit = 0
    for size in _SIZES:
        set_threads_for(size)
        rows = torch.zeros(size, next(iter(products)).in_features)
        own, panels = [*products], [*products.values()]
        # In turn, and the least of each: whatever else runs here only adds to it.
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
