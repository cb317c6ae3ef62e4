"""Products of a few rows with weights in bfloat16, compiled: half as many bytes to read, and the same bits.

A few rows' product takes as long as reading the weights. Most checkpoints are stored in bfloat16, whose numbers single
precision holds exactly: kept as they are and widened in a register, they are read twice as fast, and nothing is
rounded that was not before. What that has to agree with to the last bit is oneDNN's product of many rows. There each
sum is a chain of fused multiply-adds from zero on, in order, over so many factors (`chain`); longer sums are chains'
sums, added one after the other. `verifier_svc/kernels/cpu/few_row_products.py` finds out how long chains are here.

Weights lie in panels of `PANEL` outputs, so that a tile of rows and outputs is added up in vector registers. A word
holds the bits of two numbers, which a shift and a mask widen: output c of a panel's 32 in the lower half of word c,
and output c + 16 in the upper one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from coppice.kernels.cpu.compiler import compiled_exactly
from coppice.kernels.cpu.half_tables import FloatArray, HalfArray
from coppice.kernels.cpu.vector_code import (
    BYTES,
    FLOAT,
    HAS_WIDE_REGISTERS,
    INT,
    LANES,
    NUMBER_BYTES,
    VECTOR,
    WORDS,
    cgutils,
    in_every_lane,
    unaligned,
    unpacked,
    with_product,
)
from verifier_svc.kernels.cpu.aligned_arrays import aligned_zeros

WordArray = npt.NDArray[np.uint32]

# Numbers of a word's two halves.
_PAIR = 2 * LANES
# Sums of a tile, which stay in registers: so many outputs, of up to so many rows.
PANEL = 64 if HAS_WIDE_REGISTERS else 32
_TILE_ROWS = 6 if HAS_WIDE_REGISTERS else 2
_PAIRS = PANEL // _PAIR


def packed_panels(weights: HalfArray) -> WordArray:
    """Weights [out, in] as panels [ceil(out / PANEL), in, PANEL / 2], the last one's missing outputs zero."""
    num_outputs, num_inputs = weights.shape
    num_panels = -(-num_outputs // PANEL)
    whole = np.zeros((num_panels * PANEL, num_inputs), np.uint16)
    whole[:num_outputs] = weights
    pairs = whole.reshape(num_panels, _PAIRS, 2, LANES, num_inputs).astype(np.uint32)
    words = pairs[:, :, 0] | pairs[:, :, 1] << np.uint32(16)
    panels: WordArray = aligned_zeros(num_panels, num_inputs, _PAIRS, LANES).view(np.uint32)
    panels[:] = words.transpose(0, 3, 1, 2)
    return panels.reshape(num_panels, num_inputs, PANEL // 2)


@compiled_exactly
def multiply(rows: FloatArray, panels: WordArray, chain: int, biases: FloatArray, result: FloatArray) -> None:
    """Rows times weights, plus biases.

    Args:
        rows: [N, in].
        panels: the weights, as `packed_panels` has them.
        chain: how many factors are added up from zero on, before that is added to what was there.
        biases: [out], or [0] for none.
        result: [N, out], written.
    """
    num_rows, num_outputs = result.shape
    num_whole = num_outputs // PANEL
    for panel in range(num_whole):
        _add_up(rows, panels, chain, panel, result, panel * PANEL)
    if num_whole < len(panels):
        rest = np.empty((num_rows, PANEL), np.float32)
        _add_up(rows, panels, chain, num_whole, rest, 0)
        result[:, num_whole * PANEL :] = rest[:, : num_outputs - num_whole * PANEL]
    if len(biases):
        for row in range(num_rows):
            for output in range(num_outputs):
                result[row, output] += biases[output]


@compiled_exactly
def _add_up(rows: FloatArray, panels: WordArray, chain: int, panel: int, result: FloatArray, column: int) -> None:
    """One panel's outputs of all rows, in tiles of as equal numbers of rows as there can be."""
    num_rows, num_inputs = rows.shape
    tiles_left = (num_rows + _TILE_ROWS - 1) // _TILE_ROWS
    row = 0
    while row < num_rows:
        count = (num_rows - row + tiles_left - 1) // tiles_left
        begin = 0
        while begin < num_inputs:
            end = min(num_inputs, begin + chain)
            if count == 1:
                _one(rows, panels, result, row, panel, column, begin, end)
            elif count == 2:
                _two(rows, panels, result, row, panel, column, begin, end)
            elif count == 3:
                _three(rows, panels, result, row, panel, column, begin, end)
            elif count == 4:
                _four(rows, panels, result, row, panel, column, begin, end)
            elif count == 5:
                _five(rows, panels, result, row, panel, column, begin, end)
            else:
                _six(rows, panels, result, row, panel, column, begin, end)
            begin = end
        row += count
        tiles_left -= 1


def _tile(num_rows: int) -> Callable[..., None]:
    """A function for compiled code that adds up one chain of so many rows and one panel.

    Its arguments are the rows, the panels and the result, all contiguous; the first row, the panel, the first column of
    the result, and the first factor of the chain and the one behind its last.
    """

    @intrinsic
    def add_up(
        _typing: Any, rows: Any, panels: Any, result: Any, row: Any, panel: Any, column: Any, begin: Any, end: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            arrays, numbers = unpacked(context, builder, signature, arguments)
            _generate_tile(builder, arrays, numbers, num_rows)
            return context.get_dummy_value()

        return types.void(rows, panels, result, row, panel, column, begin, end), generate

    return add_up


def _generate_tile(builder: Any, arrays: list[Any], numbers: list[Any], num_rows: int) -> None:
    rows, panels, result = arrays
    row, panel, column, begin, end = numbers
    num_inputs = cgutils.unpack_tuple(builder, rows.shape, 2)[1]
    num_outputs = cgutils.unpack_tuple(builder, result.shape, 2)[1]
    starts = [builder.add(row, INT(number)) for number in range(num_rows)]
    factors = [_address(builder, rows, builder.mul(start, num_inputs), FLOAT) for start in starts]
    words = _address(builder, panels, builder.mul(builder.mul(panel, num_inputs), INT(PANEL // 2)), WORDS)
    targets = []
    for start in starts:
        first = builder.add(builder.mul(start, num_outputs), column)
        places = [builder.add(first, INT(LANES * vector)) for vector in range(2 * _PAIRS)]
        targets += [_address(builder, result, place, VECTOR) for place in places]

    before = builder.block
    loop, body, done = (builder.append_basic_block(name) for name in ("factors", "factor", "done"))
    builder.branch(loop)

    builder.position_at_end(loop)
    index = builder.phi(INT)
    totals = [builder.phi(VECTOR) for _ in targets]
    builder.cbranch(builder.icmp_signed("<", index, end), body, done)

    builder.position_at_end(body)
    sums = _with_products(builder, words, [builder.gep(row_factors, [index]) for row_factors in factors], index, totals)
    for total, added in zip(totals, sums, strict=True):
        total.add_incoming(ir.Constant(VECTOR, [0.0] * LANES), before)
        total.add_incoming(added, body)
    index.add_incoming(begin, before)
    index.add_incoming(builder.add(index, INT(1)), body)
    builder.branch(loop)

    builder.position_at_end(done)
    with builder.if_else(builder.icmp_signed("==", begin, INT(0))) as (first_chain, later_chain):
        with first_chain:
            for target, total in zip(targets, totals, strict=True):
                unaligned(builder.store(total, target))
        with later_chain:
            for target, total in zip(targets, totals, strict=True):
                unaligned(builder.store(builder.fadd(unaligned(builder.load(target)), total), target))


def _with_products(builder: Any, words: Any, factors: list[Any], index: Any, totals: list[Any]) -> list[Any]:
    """A tile's sums, row by row, with one product more each: of every row's factor and a panel's weights for it."""
    weights = []
    for pair in range(_PAIRS):
        place = builder.gep(words, [builder.add(builder.mul(index, INT(_PAIRS)), INT(pair))])
        both = unaligned(builder.load(place))
        lower = builder.shl(both, ir.Constant(WORDS, [16] * LANES))
        upper = builder.and_(both, ir.Constant(WORDS, [0xFFFF0000] * LANES))
        weights += [builder.bitcast(lower, VECTOR), builder.bitcast(upper, VECTOR)]
    sums = []
    for row, factor in enumerate(factors):
        numbers = in_every_lane(builder, builder.load(factor))
        row_totals = totals[row * len(weights) : (row + 1) * len(weights)]
        sums += [
            with_product(builder, total, numbers, weight) for total, weight in zip(row_totals, weights, strict=True)
        ]
    return sums


def _address(builder: Any, array: Any, element: Any, kind: Any) -> Any:
    """Where something of a kind is that begins at an element of an array."""
    place = builder.gep(builder.bitcast(array.data, BYTES), [builder.mul(element, INT(NUMBER_BYTES))])
    return builder.bitcast(place, kind.as_pointer())


_one, _two, _three = _tile(1), _tile(2), _tile(3)
_four, _five, _six = _tile(4), _tile(5), _tile(6)
