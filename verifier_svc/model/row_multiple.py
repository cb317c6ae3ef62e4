"""Of how many rows strict mode's passes are multiples: as few as this machine's matrix kernels allow.

What fills a pass up is computed and thrown away. Kernels for a handful of rows differ from those for many, whence
`ROW_MULTIPLE`; but packed products (packed_layers.py) give a row the same bits from two rows on wherever we have
looked, and those from panels (few_row_products.py) from one row on. That is tried before it is relied upon.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from verifier_svc.engine.pass_plan import padded_sizes
from verifier_svc.kernels.cpu.packed_layers import PackedLinear, one_of_each_shape
from verifier_svc.model.exactness_probe import rows_stand_alone
from verifier_svc.model.target_model import TargetModel

logger = logging.getLogger(__name__)

# In the order in which they are tried.
FINE_MULTIPLES = (1, 2)
# Products of up to so many rows are tried one by one. Those of more are not small ones to any kernel, and whole passes
# of them are tried beside a sequence alone (exactness_probe.py).
_TRIED_ROWS = 64


def refine_row_multiple(target: TargetModel, vocab_size: int) -> None:
    """Let an exact target's passes have multiples of the first of `FINE_MULTIPLES` with which every row keeps its bits.

    Without one, everything stays as it is.
    """
    coarse = target.row_multiple
    if not packs_all_products(target.model):
        return
    for multiple in FINE_MULTIPLES:
        if multiple >= coarse:
            return
        if not products_stand_alone(target, padded_sizes(_TRIED_ROWS, multiple)):
            logger.info("passes do not have multiples of %d rows: products of fewer differ", multiple)
            continue
        target.row_multiple = multiple
        if rows_stand_alone(target, vocab_size):
            logger.info("passes have multiples of %d rows", multiple)
            return
        target.row_multiple = coarse
        logger.info("passes do not have multiples of %d rows: those of fewer differ", multiple)


def packs_all_products(model: nn.Module) -> bool:
    """Whether all weights of a model that are more than a vector are packed, or looked up."""
    return all(
        isinstance(module, PackedLinear | nn.Embedding)
        for module in model.modules()
        if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    )


@torch.inference_mode()
def products_stand_alone(target: TargetModel, sizes: Sequence[int]) -> bool:
    """Whether rows have the same products with packed weights, by shape, among so many and among the most of `sizes`.

    The first rows and the last ones of these are tried, by as many threads as passes of so many rows have.
    """
    most = max(sizes)
    for layer in one_of_each_shape(target.model):
        rows = _rows(most, layer.in_features)
        target.set_threads_for(most)
        expected = layer(rows)
        for size in sizes:
            target.set_threads_for(size)
            first, last = layer(rows[:size]), layer(rows[-size:].contiguous())
            if not (torch.equal(first, expected[:size]) and torch.equal(last, expected[-size:])):
                return False
    return True


def _rows(count: int, size: int) -> torch.Tensor:
    """Rows of numbers as a model has them [count, size]."""
    return torch.randn(count, size, generator=torch.Generator().manual_seed(size))
