"""Products of linear layers by the processor's dot product of bfloat16 pairs, for any number of rows.

Inputs are rounded to bfloat16, weights are bfloat16 numbers, and sums are in single precision: each is one chain over
all pairs in order (`panel_products.py`), so a row's bits depend neither on other rows nor on threads. Many rows are cut
into blocks and panels into groups that stay in the nearer caches meanwhile.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from coppice.kernels.cpu.compiler import compiled_exactly
from coppice.kernels.cpu.half_tables import FloatArray, HalfArray, halves
from verifier_svc.kernels.cpu.packed_layers import PackedLinear
from verifier_svc.kernels.cpu.panel_products import (
    PANEL,
    add_up,
    address,
    begin_products,
    end_products,
    pair_panels,
    put_inputs,
)
from verifier_svc.kernels.cpu.shared_work import CounterArray, SharedThreads, done, new_counters, take, wait_for

# Rows of a block: whole tiles.
_BLOCK_ROWS = 48
# Weights of a group of panels, half of a usual second cache.
_GROUP_BYTES = 512 * 1024
# Multiplications that take a thread about as long as it takes to wake one, as a power of two; reading a weight takes as
# long as this many.
_WORTH_BITS = 24
_PER_WEIGHT = 8


class PairProduct:
    """Product with a float32 layer's weight and bias, whose weights are bfloat16 numbers."""

    def __init__(self, linear: nn.Linear | PackedLinear, threads: SharedThreads) -> None:
        weight = linear.weight.detach()
        self._num_outputs, self._num_inputs = weight.shape
        # Pairs: an odd number of inputs is padded.
        padded = nn.functional.pad(weight, (0, self._num_inputs % 2))
        self._panels = pair_panels(halves(padded.numpy()))
        self._biases = np.empty(0, np.float32) if linear.bias is None else linear.bias.detach().numpy()
        self._group = max(1, _GROUP_BYTES // self._panels[0].nbytes)
        self._threads = threads

    def __call__(self, rows: Tensor) -> Tensor:
        """`rows` [..., in] to [..., out]."""
        result = torch.empty(*rows.shape[:-1], self._num_outputs)
        inputs = rows.contiguous().numpy().reshape(-1, self._num_inputs)
        outputs = result.numpy().reshape(-1, self._num_outputs)
        work = max(len(inputs), _PER_WEIGHT) * self._num_inputs * self._num_outputs >> _WORTH_BITS
        num_threads = max(1, min(torch.get_num_threads(), work))
        arguments = inputs, self._panels, self._group, self._biases, outputs, new_counters(1)
        self._threads.call(multiply_rounded, num_threads, *arguments)
        return result


@compiled_exactly
def multiply_rounded(
    rows: FloatArray, panels: HalfArray, group: int, biases: FloatArray, result: FloatArray, counters: CounterArray
) -> None:
    """Rows rounded to bfloat16 times weights, plus biases: one phase; a piece is a block of rows and a group of panels.

    Args:
        rows: [N, in].
        panels: weights from `pair_panels`.
        group: panels of a piece.
        biases: [out], or [0] for none.
        result: [N, out], written.
        counters: see `shared_work.py`.
    """
    num_rows, num_outputs = result.shape
    num_inputs, num_steps = rows.shape[1], panels.shape[1]
    num_blocks = -(-num_rows // _BLOCK_ROWS)
    num_pieces = num_blocks * -(-len(panels) // group)
    most = min(num_rows, _BLOCK_ROWS)
    inputs = np.zeros((most, 2 * num_steps), np.uint16)
    rest = np.empty((most, PANEL), np.float32)
    piece = take(counters, 0)
    while piece < num_pieces:
        first = piece % num_blocks * _BLOCK_ROWS
        count = min(_BLOCK_ROWS, num_rows - first)
        for row in range(count):
            put_inputs(rows[first + row], inputs[row, :num_inputs])
        block = result[first : first + count]
        begin_products(inputs[:count], panels)
        begin = piece // num_blocks * group
        for panel in range(begin, min(begin + group, len(panels))):
            column = panel * PANEL
            width = min(PANEL, num_outputs - column)
            ahead = address(panels, panel + 1)
            if width == PANEL:
                add_up(inputs[:count], panels, num_steps, panel, block, column, ahead)
            else:
                add_up(inputs[:count], panels, num_steps, panel, rest[:count], 0, ahead)
                block[:, column:] = rest[:count, :width]
            if len(biases) > 0:
                for row in range(count):
                    for output in range(column, column + width):
                        block[row, output] += biases[output]
        end_products(inputs[:count], panels)
        done(counters, 0)
        piece = take(counters, 0)
    wait_for(counters, 0, num_pieces)
