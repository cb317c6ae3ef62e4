"""Compiled products of rows with weights in panels: each sum has the same chains for any number of rows.

Products of a few rows are bound by reading the weights. Most checkpoints are in bfloat16, which single precision
represents exactly: kept as stored and widened in registers, weights are read twice as fast without further rounding.
Weights that are not exact in bfloat16 are kept in single precision.

A sum is a chain of `chain` fused multiply-adds from zero, in order; longer sums add chains in order. Compiled layers
have one chain. If oneDNN computes products of many rows, chains are as long as its own, which
`verifier_svc/kernels/cpu/few_row_products.py` determines.

Weights are in panels of `PANEL` outputs, so that a tile of rows and outputs is added up in vector registers. In
bfloat16 a word holds the bits of two numbers, widened by a shift and a mask: output c of a panel's 32 in the lower half
of word c, and output c + 16 in the upper one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, overload

from coppice.kernels.cpu.compiler import compiled_exactly
from coppice.kernels.cpu.half_tables import FloatArray, HalfArray
from coppice.kernels.cpu.vector_code import (
    BYTES,
    FLOAT,
    HAS_WIDE_REGISTERS,
    INT,
    LANES,
    LINE_BYTES,
    NUMBER_BYTES,
    VECTOR,
    WORD,
    WORDS,
    cgutils,
    fetch,
    half_of,
    in_every_lane,
    unaligned,
    unpacked,
    with_product,
)
from verifier_svc.kernels.cpu.aligned_arrays import aligned_zeros
from verifier_svc.kernels.cpu.amx_products import TILE, add_up_tiles, begin_tiles, end_tiles, suits_tiles

WordArray = npt.NDArray[np.uint32]
Panels: TypeAlias = FloatArray | WordArray | HalfArray | npt.NDArray[np.int8]
Inputs: TypeAlias = FloatArray | HalfArray

# Numbers in the halves of a vector of words.
_PAIR = 2 * LANES
_HALF_BYTES = 2
# Tile of sums in registers: outputs, and upper bound of rows.
PANEL = 64 if HAS_WIDE_REGISTERS else 32
_TILE_ROWS = 6 if HAS_WIDE_REGISTERS else 2
_PAIRS = PANEL // _PAIR
_VECTORS = PANEL // LANES
_PAIR_PRODUCT = "llvm.x86.avx512bf16.dpbf16ps.512"
_BYTE_VECTOR = ir.VectorType(ir.IntType(8), LANES)


class _BFloat(ir.types._BaseFloatType):  # type: ignore[misc]
    """LLVM's bfloat16, which llvmlite lacks."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()
_HALVES = ir.VectorType(_BFloat(), _PAIR)


def packed_panels(weights: HalfArray) -> WordArray:
    """Weights [out, in] as panels [ceil(out / PANEL), in, PANEL / 2], padded with zeros."""
    num_inputs = weights.shape[1]
    whole = _whole_panels(weights)
    pairs = whole.reshape(len(whole), _PAIRS, 2, LANES, num_inputs).astype(np.uint32)
    words = pairs[:, :, 0] | pairs[:, :, 1] << np.uint32(16)
    panels: WordArray = aligned_zeros(len(whole), num_inputs, _PAIRS, LANES).view(np.uint32)
    panels[:] = words.transpose(0, 3, 1, 2)
    return panels.reshape(len(whole), num_inputs, PANEL // 2)


def float_panels(weights: FloatArray) -> FloatArray:
    """Weights [out, in] in single precision as panels [ceil(out / PANEL), in, PANEL]."""
    whole = _whole_panels(weights)
    panels = aligned_zeros(len(whole), weights.shape[1], PANEL)
    panels[:] = whole.transpose(0, 2, 1)
    return panels


def byte_panels(weights: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """Weights [out, in] of 8 bits, without scales, as panels [ceil(out / PANEL), in, PANEL]."""
    whole = _whole_panels(weights).transpose(0, 2, 1)
    panels = aligned_zeros(-(-whole.size // NUMBER_BYTES)).view(np.int8)[: whole.size].reshape(whole.shape)
    panels[:] = whole
    return panels


def byte_pair_panels(weights: npt.NDArray[np.int8]) -> npt.NDArray[np.int8]:
    """Weights [out, in] of 8 bits, without scales, as panels [ceil(out / PANEL), in / 2, 2 * PANEL].

    For the processor's products of pairs: inputs are in bfloat16, and even in number.
    """
    panels = byte_panels(weights)
    panels = panels.reshape(len(panels), -1, 2 * PANEL)
    _order_tiles(panels, apart=2)
    return panels


def pair_panels(weights: HalfArray) -> HalfArray:
    """Weights [out, in] as panels [ceil(out / PANEL), in / 2, PANEL, 2], for the processor's products of pairs.

    Inputs are in bfloat16 too, and even in number.
    """
    whole = _whole_panels(weights)
    split = whole.reshape(len(whole), PANEL, -1, 2)
    panels: HalfArray = aligned_zeros(*split.transpose(0, 2, 1, 3).shape[:3]).view(np.uint16)
    panels = panels.reshape(len(whole), -1, PANEL, 2)
    panels[:] = split.transpose(0, 2, 1, 3)
    _order_tiles(panels, apart=1)
    return panels


def _order_tiles(panels: npt.NDArray[Any], apart: int) -> None:
    """Order panels of pairs [P, in / 2, ...] as `add_up_tiles` reads them; where it does not, nothing changes.

    With `apart` = 1 the numbers of a pair are next to each other, with 2 all first numbers come before all second ones.
    """
    if suits_tiles(panels.shape[1]):
        steps = panels.reshape(len(panels), -1, TILE, apart, PANEL // TILE, TILE, 2 // apart)
        panels[:] = steps.transpose(0, 1, 4, 2, 3, 5, 6).reshape(panels.shape)


def _whole_panels(weights: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Weights [out, in] as [ceil(out / PANEL), PANEL, in], padded with zeros."""
    num_outputs, num_inputs = weights.shape
    num_panels = -(-num_outputs // PANEL)
    whole = np.zeros((num_panels * PANEL, num_inputs), weights.dtype)
    whole[:num_outputs] = weights
    return whole.reshape(num_panels, PANEL, num_inputs)


@compiled_exactly
def multiply(rows: FloatArray, panels: WordArray, chain: int, biases: FloatArray, result: FloatArray) -> None:
    """Rows times weights, plus biases.

    Args:
        rows: [N, in].
        panels: weights from `packed_panels`.
        chain: factors added up from zero before the result is added to the previous chains'.
        biases: [out], or [0] for none.
        result: [N, out], written.
    """
    num_rows, num_outputs = result.shape
    num_whole = num_outputs // PANEL
    for panel in range(num_whole):
        add_up(rows, panels, chain, panel, result, panel * PANEL, address(panels, panel + 1))
    if num_whole < len(panels):
        rest = np.empty((num_rows, PANEL), np.float32)
        add_up(rows, panels, chain, num_whole, rest, 0, address(panels, num_whole))
        result[:, num_whole * PANEL :] = rest[:, : num_outputs - num_whole * PANEL]
    if len(biases):
        for row in range(num_rows):
            for output in range(num_outputs):
                result[row, output] += biases[output]


@compiled_exactly
def multiply_panel(
    inputs: Inputs, panels: Panels, panel: int, scales: FloatArray, biases: FloatArray, result: FloatArray, ahead: int
) -> None:
    """One panel's outputs of all rows, each sum in one chain, times scales and plus biases; see `add_up`.

    Args:
        inputs: [N, in], in single precision, or for panels of pairs in bfloat16.
        panels: the weights.
        panel: index of the panel.
        scales: of all outputs [panels * PANEL], or [0] for none.
        biases: the same.
        result: [N, panels * PANEL]; the panel's columns are written.
        ahead: see `add_up`.
    """
    begin = panel * PANEL
    add_up(inputs, panels, panels.shape[1], panel, result, begin, ahead)
    if len(scales) > 0:
        for row in range(len(result)):
            for column in range(begin, begin + PANEL):
                result[row, column] *= scales[column]
    if len(biases) > 0:
        for row in range(len(result)):
            for column in range(begin, begin + PANEL):
                result[row, column] += biases[column]


@compiled_exactly
def uses_tiles(inputs: Inputs, panels: Panels) -> bool:
    """Whether products of these are computed in the processor's tiles; then see `begin_products`."""
    return inputs.itemsize == _HALF_BYTES and suits_tiles(panels.shape[1])


@compiled_exactly
def begin_products(inputs: Inputs, panels: Panels) -> None:
    """Set this thread up for products of these inputs with some panels, until `end_products`."""
    if uses_tiles(inputs, panels):
        begin_tiles(len(inputs))


@compiled_exactly
def end_products(inputs: Inputs, panels: Panels) -> None:
    """Free what `begin_products` has set up."""
    if uses_tiles(inputs, panels):
        end_tiles()


@compiled_exactly
def address(panels: Panels, panel: int) -> int:
    """Address of a panel of contiguous weights; that of the last one beyond it."""
    return int(panels.ctypes.data + min(panel, len(panels) - 1) * panels.strides[0])


@compiled_exactly
def fetched_bytes(panels: Panels) -> int:
    """Bytes that a tile fetches ahead in each of its steps: half of a step's weights."""
    return int(max(LINE_BYTES, panels.strides[1] // 2))


def put_inputs(numbers: FloatArray, target: Inputs) -> None:
    """Write numbers [n] as inputs of products: unchanged, or rounded to bfloat16 for such a target."""
    write: Callable[..., None] = _put_halves if target.dtype == np.uint16 else _put_floats
    write(numbers, target)


@overload(put_inputs, strict=False)
def _choose_put(numbers: Any, target: Any) -> Callable[..., None]:
    write = _put_halves if target.dtype.name == "uint16" else _put_floats
    return lambda numbers, target: write(numbers, target)


@compiled_exactly
def _put_floats(numbers: FloatArray, target: FloatArray) -> None:
    for index in range(len(numbers)):
        target[index] = numbers[index]


@compiled_exactly
def _put_halves(numbers: FloatArray, target: HalfArray) -> None:
    for index in range(len(numbers)):
        target[index] = half_of(numbers[index])


@compiled_exactly
def add_up(inputs: Inputs, panels: Panels, chain: int, panel: int, result: FloatArray, column: int, ahead: int) -> None:
    """One panel's outputs of all rows, in tiles of rows, between `begin_products` and `end_products`.

    Args:
        inputs: [N, in], in single precision, or for panels of pairs in bfloat16.
        panels: the weights.
        chain: as in `multiply`, in the panels' steps.
        panel: index of the panel.
        result: [N, ...], written from `column` on.
        column: first column of the panel's outputs.
        ahead: address of the panel that is needed next. It is fetched into the cache meanwhile: half of it by each of
            the first two tiles.
    """
    num_rows, num_steps = len(inputs), panels.shape[1]
    if uses_tiles(inputs, panels):
        add_up_tiles(inputs, panels, panel, result, column, ahead)
        return
    count = min(num_rows, _TILE_ROWS)
    row = 0
    while row < num_rows:
        # The last tile has some rows of the one before: whole tiles leave time to fetch.
        first = min(row, num_rows - count)
        begin = 0
        while begin < num_steps:
            end = min(num_steps, begin + chain)
            if count == 1:
                _one(inputs, panels, result, first, panel, column, begin, end, ahead)
            elif count == 2:
                _two(inputs, panels, result, first, panel, column, begin, end, ahead)
            elif count == 3:
                _three(inputs, panels, result, first, panel, column, begin, end, ahead)
            elif count == 4:
                _four(inputs, panels, result, first, panel, column, begin, end, ahead)
            elif count == 5:
                _five(inputs, panels, result, first, panel, column, begin, end, ahead)
            else:
                _six(inputs, panels, result, first, panel, column, begin, end, ahead)
            begin = end
        if row == 0:
            ahead += num_steps * fetched_bytes(panels)
        row += count


def _tile(num_rows: int) -> Callable[..., None]:
    """Intrinsic that adds up one chain of `num_rows` rows and one panel.

    Its arguments are the inputs, the panels and the result, all contiguous; the first row, the panel, the first column
    of the result, the first step of the chain and the one after its last, and the address to fetch from meanwhile.
    """

    @intrinsic
    def add_chain(
        _typing: Any,
        inputs: Any,
        panels: Any,
        result: Any,
        row: Any,
        panel: Any,
        column: Any,
        begin: Any,
        end: Any,
        ahead: Any,
    ) -> Any:
        kind = _KINDS[inputs.dtype.name, panels.dtype.name]

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            arrays, numbers = unpacked(context, builder, signature, arguments)
            _generate_tile(builder, arrays, numbers, num_rows, kind(builder))
            return context.get_dummy_value()

        return types.void(inputs, panels, result, row, panel, column, begin, end, ahead), generate

    return add_chain


class _Floats:
    """Panels in single precision: `step_bytes` of weights and `input_bytes` of inputs per step."""

    step_bytes = PANEL * NUMBER_BYTES
    input_bytes = NUMBER_BYTES

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def fetch(self, ahead: Any, step: Any) -> None:
        """Fetch a step's share of the panel at an address into the cache; see `fetched_bytes`."""
        share = max(LINE_BYTES, self.step_bytes // 2)
        fetch(self.builder, self.builder.add(ahead, self.builder.mul(step, INT(share))), share)

    def factor(self, address: Any) -> Any:
        """A row's input at an address, in every lane."""
        return in_every_lane(self.builder, self.builder.load(self.builder.bitcast(address, FLOAT.as_pointer())))

    def weights(self, address: Any) -> list[Any]:
        """Weights of a step, a vector per `LANES` outputs."""
        return [self.vector(address, VECTOR, at * LANES * NUMBER_BYTES) for at in range(_VECTORS)]

    def vector(self, address: Any, kind: Any, offset: int) -> Any:
        """A vector of some type, `offset` bytes from an address."""
        place = self.builder.gep(address, [INT(offset)])
        loaded = self.builder.load(self.builder.bitcast(place, kind.as_pointer()))
        loaded.align = 1
        return loaded

    def whole_numbers(self, address: Any) -> list[Any]:
        """8-bit integers in single precision, a vector per `LANES` outputs."""
        numbers = [self.vector(address, _BYTE_VECTOR, at * LANES) for at in range(_VECTORS)]
        return [self.builder.sitofp(self.builder.sext(some, WORDS), VECTOR) for some in numbers]

    def added(self, total: Any, factor: Any, weight: Any) -> Any:
        """A sum plus one product."""
        return with_product(self.builder, total, factor, weight)


class _Words(_Floats):
    """Two bfloat16 numbers per word."""

    step_bytes = PANEL * NUMBER_BYTES // 2

    def weights(self, address: Any) -> list[Any]:
        found = []
        for pair in range(_PAIRS):
            both = self.vector(address, WORDS, pair * LANES * NUMBER_BYTES)
            lower = self.builder.shl(both, ir.Constant(WORDS, [16] * LANES))
            upper = self.builder.and_(both, ir.Constant(WORDS, [0xFFFF0000] * LANES))
            found += [self.builder.bitcast(lower, VECTOR), self.builder.bitcast(upper, VECTOR)]
        return found


class _Bytes(_Floats):
    """8-bit integers."""

    step_bytes = PANEL

    def weights(self, address: Any) -> list[Any]:
        return self.whole_numbers(address)


class _Pairs(_Floats):
    """Pairs of inputs and weights in bfloat16, for the dot-product instruction."""

    def factor(self, address: Any) -> Any:
        both = self.builder.load(self.builder.bitcast(address, WORD.as_pointer()))
        return self.builder.bitcast(in_every_lane(self.builder, both), _HALVES)

    def weights(self, address: Any) -> list[Any]:
        return [self.vector(address, _HALVES, at * LANES * NUMBER_BYTES) for at in range(_VECTORS)]

    def added(self, total: Any, factor: Any, weight: Any) -> Any:
        kind = ir.FunctionType(VECTOR, [VECTOR, _HALVES, _HALVES])
        product = cgutils.get_or_insert_function(self.builder.module, kind, _PAIR_PRODUCT)
        return self.builder.call(product, [total, factor, weight])


class _BytePairs(_Pairs):
    """Pairs of inputs in bfloat16 and of 8-bit integers, which are exact in bfloat16."""

    step_bytes = 2 * PANEL

    def weights(self, address: Any) -> list[Any]:
        places = address, self.builder.gep(address, [INT(PANEL)])
        firsts, seconds = ([self.builder.bitcast(some, WORDS) for some in self.whole_numbers(at)] for at in places)
        # The lower halves of these words are zero.
        lowered = [self.builder.lshr(first, ir.Constant(WORDS, [16] * LANES)) for first in firsts]
        return [
            self.builder.bitcast(self.builder.or_(first, second), _HALVES)
            for first, second in zip(lowered, seconds, strict=True)
        ]


# By types of inputs and panels.
_KINDS = {
    ("float32", "float32"): _Floats,
    ("float32", "uint32"): _Words,
    ("float32", "int8"): _Bytes,
    ("uint16", "uint16"): _Pairs,
    ("uint16", "int8"): _BytePairs,
}


def _generate_tile(builder: Any, arrays: list[Any], numbers: list[Any], num_rows: int, kind: _Floats) -> None:
    inputs, panels, result = arrays
    row, panel, column, begin, end, ahead = numbers
    input_stride = cgutils.unpack_tuple(builder, inputs.strides, 2)[0]
    num_outputs = cgutils.unpack_tuple(builder, result.shape, 2)[1]
    starts = [builder.add(row, INT(number)) for number in range(num_rows)]
    factors = [builder.gep(_bytes(builder, inputs), [builder.mul(start, input_stride)]) for start in starts]
    num_steps = builder.extract_value(panels.shape, 1)
    steps = builder.gep(_bytes(builder, panels), [builder.mul(builder.mul(panel, num_steps), INT(kind.step_bytes))])
    targets = []
    for start in starts:
        first = builder.add(builder.mul(start, num_outputs), column)
        for vector in range(_VECTORS):
            place = builder.mul(builder.add(first, INT(LANES * vector)), INT(NUMBER_BYTES))
            targets.append(builder.bitcast(builder.gep(_bytes(builder, result), [place]), VECTOR.as_pointer()))

    before = builder.block
    loop, body, finished = (builder.append_basic_block(name) for name in ("steps", "step", "done"))
    builder.branch(loop)

    builder.position_at_end(loop)
    index = builder.phi(INT)
    totals = [builder.phi(VECTOR) for _ in targets]
    builder.cbranch(builder.icmp_signed("<", index, end), body, finished)

    builder.position_at_end(body)
    weights = kind.weights(builder.gep(steps, [builder.mul(index, INT(kind.step_bytes))]))
    kind.fetch(ahead, index)
    offset = builder.mul(index, INT(kind.input_bytes))
    sums = []
    for number, row_factors in enumerate(factors):
        factor = kind.factor(builder.gep(row_factors, [offset]))
        row_totals = totals[number * _VECTORS : (number + 1) * _VECTORS]
        sums += [kind.added(total, factor, weight) for total, weight in zip(row_totals, weights, strict=True)]
    for total, added in zip(totals, sums, strict=True):
        total.add_incoming(ir.Constant(VECTOR, [0.0] * LANES), before)
        total.add_incoming(added, body)
    index.add_incoming(begin, before)
    index.add_incoming(builder.add(index, INT(1)), body)
    builder.branch(loop)

    builder.position_at_end(finished)
    with builder.if_else(builder.icmp_signed("==", begin, INT(0))) as (first_chain, later_chain):
        with first_chain:
            for target, total in zip(targets, totals, strict=True):
                unaligned(builder.store(total, target))
        with later_chain:
            for target, total in zip(targets, totals, strict=True):
                unaligned(builder.store(builder.fadd(unaligned(builder.load(target)), total), target))


def _bytes(builder: Any, array: Any) -> Any:
    """Address of an array."""
    return builder.bitcast(array.data, BYTES)


_one, _two, _three = _tile(1), _tile(2), _tile(3)
_four, _five, _six = _tile(4), _tile(5), _tile(6)
