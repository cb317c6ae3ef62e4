"""Products of a few rows with weights in bfloat16, compiled: half as many bytes to read, and the same bits.

A few rows' product takes as long as reading the weights. Most checkpoints are stored in bfloat16, whose numbers single
precision holds exactly: kept as they are and widened in a register, they are read twice as fast, and nothing is
rounded that was not before. What that has to agree with to the last bit is oneDNN's product of many rows. There each
sum is a chain of fused multiply-adds from zero on, in order, over so many factors (`chain`); longer sums are chains'
sums, added one after the other. `verifier_svc/packed_linear.py` finds out how long chains are here.

Weights lie in panels of `PANEL` outputs, so that a tile of rows and outputs is added up in vector registers. A word
holds the bits of two numbers, which a shift and a mask widen: output c of a panel's 32 in the lower half of word c,
and output c + 16 in the upper one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba.core.cgutils
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from coppice.compiler import compiled_exactly
from coppice.half_tables import FloatArray, HalfArray
from verifier_svc.aligned_arrays import aligned_zeros

WordArray = npt.NDArray[np.uint32]
cgutils: Any = numba.core.cgutils

_FEATURES: Any = llvmlite.binding.get_host_cpu_features()
_HAS_WIDE_REGISTERS = bool(_FEATURES.get("avx512f"))
# Without a fused multiply-add the compiler would call a function for each.
HAS_FUSED = _HAS_WIDE_REGISTERS or bool(_FEATURES.get("fma") or _FEATURES.get("neon"))

# Numbers of a vector, and of a word's two halves.
_LANES = 16
_PAIR = 2 * _LANES
# Sums of a tile, which stay in registers: so many outputs, of up to so many rows.
PANEL = 64 if _HAS_WIDE_REGISTERS else 32
_TILE_ROWS = 6 if _HAS_WIDE_REGISTERS else 2
_PAIRS = PANEL // _PAIR

_FLOAT, _WORD, _INT = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR, _WORDS = ir.VectorType(_FLOAT, _LANES), ir.VectorType(_WORD, _LANES)
_BYTES = ir.IntType(8).as_pointer()
_FIRST_LANE = ir.Constant(_WORDS, [0] * _LANES)
_WORD_BYTES = 4
_FUSED = f"llvm.fma.v{_LANES}f32"


def packed_panels(weights: HalfArray) -> WordArray:
    """Weights [out, in] as panels [ceil(out / PANEL), in, PANEL / 2], the last one's missing outputs zero."""
    num_outputs, num_inputs = weights.shape
    num_panels = -(-num_outputs // PANEL)
    whole = np.zeros((num_panels * PANEL, num_inputs), np.uint16)
    whole[:num_outputs] = weights
    pairs = whole.reshape(num_panels, _PAIRS, 2, _LANES, num_inputs).astype(np.uint32)
    words = pairs[:, :, 0] | pairs[:, :, 1] << np.uint32(16)
    panels: WordArray = aligned_zeros(num_panels, num_inputs, _PAIRS, _LANES).view(np.uint32)
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
            numbers = [
                context.cast(builder, value, kind, types.int64)
                for value, kind in zip(arguments[3:], signature.args[3:], strict=True)
            ]
            arrays = [
                cgutils.create_struct_proxy(kind)(context, builder, value)
                for kind, value in zip(signature.args[:3], arguments[:3], strict=True)
            ]
            _generate_tile(builder, arrays, numbers, num_rows)
            return context.get_dummy_value()

        return types.void(rows, panels, result, row, panel, column, begin, end), generate

    return add_up


def _generate_tile(builder: Any, arrays: list[Any], numbers: list[Any], num_rows: int) -> None:
    rows, panels, result = arrays
    row, panel, column, begin, end = numbers
    num_inputs = cgutils.unpack_tuple(builder, rows.shape, 2)[1]
    num_outputs = cgutils.unpack_tuple(builder, result.shape, 2)[1]
    starts = [builder.add(row, _INT(number)) for number in range(num_rows)]
    factors = [_address(builder, rows, builder.mul(start, num_inputs), _FLOAT) for start in starts]
    words = _address(builder, panels, builder.mul(builder.mul(panel, num_inputs), _INT(PANEL // 2)), _WORDS)
    targets = []
    for start in starts:
        first = builder.add(builder.mul(start, num_outputs), column)
        places = [builder.add(first, _INT(_LANES * vector)) for vector in range(2 * _PAIRS)]
        targets += [_address(builder, result, place, _VECTOR) for place in places]

    before = builder.block
    loop, body, done = (builder.append_basic_block(name) for name in ("factors", "factor", "done"))
    builder.branch(loop)

    builder.position_at_end(loop)
    index = builder.phi(_INT)
    totals = [builder.phi(_VECTOR) for _ in targets]
    builder.cbranch(builder.icmp_signed("<", index, end), body, done)

    builder.position_at_end(body)
    sums = _with_products(builder, words, [builder.gep(row_factors, [index]) for row_factors in factors], index, totals)
    for total, added in zip(totals, sums, strict=True):
        total.add_incoming(ir.Constant(_VECTOR, [0.0] * _LANES), before)
        total.add_incoming(added, body)
    index.add_incoming(begin, before)
    index.add_incoming(builder.add(index, _INT(1)), body)
    builder.branch(loop)

    builder.position_at_end(done)
    with builder.if_else(builder.icmp_signed("==", begin, _INT(0))) as (first_chain, later_chain):
        with first_chain:
            for target, total in zip(targets, totals, strict=True):
                _unaligned(builder.store(total, target))
        with later_chain:
            for target, total in zip(targets, totals, strict=True):
                _unaligned(builder.store(builder.fadd(_unaligned(builder.load(target)), total), target))


def _with_products(builder: Any, words: Any, factors: list[Any], index: Any, totals: list[Any]) -> list[Any]:
    """A tile's sums, row by row, with one product more each: of every row's factor and a panel's weights for it."""
    weights = []
    for pair in range(_PAIRS):
        place = builder.gep(words, [builder.add(builder.mul(index, _INT(_PAIRS)), _INT(pair))])
        both = _unaligned(builder.load(place))
        lower = builder.shl(both, ir.Constant(_WORDS, [16] * _LANES))
        upper = builder.and_(both, ir.Constant(_WORDS, [0xFFFF0000] * _LANES))
        weights += [builder.bitcast(lower, _VECTOR), builder.bitcast(upper, _VECTOR)]
    fused = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), _FUSED)
    unknown = ir.Constant(_VECTOR, ir.Undefined)
    sums = []
    for row, factor in enumerate(factors):
        number = builder.insert_element(unknown, builder.load(factor), _WORD(0))
        numbers = builder.shuffle_vector(number, unknown, _FIRST_LANE)
        row_totals = totals[row * len(weights) : (row + 1) * len(weights)]
        sums += [builder.call(fused, [numbers, *pair]) for pair in zip(weights, row_totals, strict=True)]
    return sums


def _address(builder: Any, array: Any, element: Any, kind: Any) -> Any:
    """Where something of a kind is that begins at an element of an array."""
    place = builder.gep(builder.bitcast(array.data, _BYTES), [builder.mul(element, _INT(_WORD_BYTES))])
    return builder.bitcast(place, kind.as_pointer())


def _unaligned(access: Any) -> Any:
    """The same load or store, which may be of any element."""
    access.align = _WORD_BYTES
    return access


_one, _two, _three = _tile(1), _tile(2), _tile(3)
_four, _five, _six = _tile(4), _tile(5), _tile(6)
