"""Row multiple of strict mode's passes: the smallest that this machine's matrix kernels allow.

Padding rows are wasted. Kernels for a few rows differ from those for many, hence `ROW_MULTIPLE`; but packed products
(packed_layers.py) gave a row the same bits from two rows on wherever tested, and those from panels
(few_row_products.py) from one row on. This is tested at load time.
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

# In the order of testing.
FINE_MULTIPLES = (1, 2)
# Products of up to this many rows are tested one by one. Larger ones are not small for any kernel, and are covered by
# whole passes (exactness_probe.py).
_TRIED_ROWS = 64


def refine_row_multiple(target: TargetModel, vocab_size: int) -> None:
    """Set an exact target's row multiple to the first of `FINE_MULTIPLES` that keeps every row's bits.

    Without one, it is left unchanged.
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
    """Whether all weights of a model except vectors are packed, or embeddings."""
    return all(
        isinstance(module, PackedLinear | nn.Embedding)
        for module in model.modules()
        if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    )


@torch.inference_mode()
def products_stand_alone(target: TargetModel, sizes: Sequence[int]) -> bool:
    """Whether packed products, one per shape, give rows the same bits in all `sizes` as in the largest.

    The first and last rows are tested, with the threads of passes of each size.
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
    """Random rows [count, size]."""
    return torch.randn(count, size, generator=torch.Generator().manual_seed(size))
