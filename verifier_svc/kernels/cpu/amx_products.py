"""Products of rows with a panel of weights by the processor's products of bfloat16 tiles (Intel AMX).

A tile has 16 rows of 64 bytes. The processor adds the product of 16 rows of 32 inputs with 32 inputs of 16 outputs to
16 x 16 sums: per sum one chain of fused multiply-adds from zero over the even inputs and one over the odd ones, then
their sum is added to the sum so far. So a row's bits depend on the row alone.

Weights are tile after tile: of 16 pairs of inputs and 16 outputs, by steps of inputs and then by outputs of a panel. Up
to 16 rows take all outputs of a panel in one run over its weights; up to 32 take half of the outputs in each of two
runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from coppice.kernels.cpu.amx import MULTIPLIES_TILES
from coppice.kernels.cpu.compiler import compiled_exactly
from coppice.kernels.cpu.half_tables import FloatArray
from coppice.kernels.cpu.vector_code import BYTES, INT, LANES, LINE_BYTES, VECTOR, WORD, WORDS, cgutils, fetch

# Rows of a tile, and bytes of each. A row of weights is that many pairs, for 16 outputs.
TILE = 16
_ROW_BYTES = 64
_TILES = 8
# Outputs of a panel, and tiles of them.
_PANEL = 64
_COLUMNS = _PANEL // TILE
_MOST_ROWS = 2 * TILE
_NUMBER_BYTES, _HALF_BYTES = 4, 2
# Of a configuration: the palette, bytes of rows by tile (16 bits), rows by tile (8 bits).
_CONFIGURATION_BYTES, _WIDTHS_AT, _ROWS_AT = 64, 16, 48
_BYTE, _SHORT = ir.IntType(8), ir.IntType(16)
_BYTE_VECTOR = ir.VectorType(_BYTE, LANES)


@compiled_exactly
def suits_tiles(num_steps: int) -> bool:
    """Whether panels of so many pairs of inputs are whole tiles."""
    return MULTIPLIES_TILES and num_steps % TILE == 0


@compiled_exactly
def begin_tiles(num_rows: int) -> None:
    """Set up this thread's tiles for `add_up_tiles` with so many rows, once for many panels: it takes 0.1 us."""
    if num_rows <= TILE:
        # Tiles without rows are an error.
        _few_rows(max(1, num_rows))
    else:
        _many_rows(min(num_rows, _MOST_ROWS))


@compiled_exactly
def end_tiles() -> None:
    """Free this thread's tiles, which would be saved when another thread gets the core."""
    _release()


@compiled_exactly
def add_up_tiles(
    inputs: npt.NDArray[Any], panels: npt.NDArray[Any], panel: int, result: FloatArray, column: int, ahead: int
) -> None:
    """One panel's outputs of all rows; the thread's tiles are set up for their number.

    Args:
        inputs: [N, in] in bfloat16, contiguous.
        panels: from `pair_panels` or `byte_pair_panels`, in tiles.
        panel: index of the panel.
        result: [N, ...], contiguous, written from `column` on.
        column: first column of the panel's outputs.
        ahead: address of the panel that is needed next, fetched into the cache meanwhile.
    """
    num_rows, num_tiles = len(inputs), panels.shape[1] // TILE
    weights = panels.ctypes.data + panel * panels.strides[0]
    is_wide = panels.itemsize == _HALF_BYTES
    count = min(num_rows, _MOST_ROWS)
    row = 0
    while row < num_rows:
        # The last rows have some of those before once more, for which tiles are set up.
        first = min(row, num_rows - count)
        source = inputs.ctypes.data + first * inputs.strides[0]
        target = result.ctypes.data + first * result.strides[0] + column * _NUMBER_BYTES
        if is_wide and count <= TILE:
            _few(source, inputs.strides[0], weights, num_tiles, target, result.strides[0], ahead, row == 0)
        elif is_wide:
            _many(source, inputs.strides[0], weights, num_tiles, target, result.strides[0], ahead, row == 0)
        elif count <= TILE:
            _few_bytes(source, inputs.strides[0], weights, num_tiles, target, result.strides[0], ahead, row == 0)
        else:
            _many_bytes(source, inputs.strides[0], weights, num_tiles, target, result.strides[0], ahead, row == 0)
        row += count


class _AmxCode:
    """Generated code for tiles of sums: `num_blocks` blocks of rows by some tiles of outputs at a time.

    Tiles 0 to 3 are sums, the following ones inputs by block, the others weights in turn.
    """

    def __init__(self, builder: Any, num_blocks: int, is_bytes: bool) -> None:
        self.builder = builder
        self.num_blocks, self.is_bytes = num_blocks, is_bytes
        self.num_columns = _COLUMNS // num_blocks
        self.num_sums = self.num_columns * num_blocks
        self.first_weight = self.num_sums + num_blocks
        # Bytes of 16 pairs of inputs of a panel.
        self.step_bytes = TILE * _PANEL * 2 * (1 if is_bytes else _HALF_BYTES)

    def generate(self, arguments: list[Any]) -> None:
        """Code of one call; the arguments are those of `_call`."""
        builder = self.builder
        source, source_stride, weights, num_tiles, target, target_stride, ahead, fetches = arguments
        widened = cgutils.alloca_once(builder, ir.ArrayType(VECTOR, _COLUMNS * TILE)) if self.is_bytes else None
        if widened is not None:
            widened.align = LINE_BYTES
        for run in range(self.num_blocks):
            first = run * self.num_columns
            for tile in range(self.num_sums):
                self._call("tilezero", [_BYTE(tile)])
            with cgutils.for_range(builder, num_tiles) as loop:
                for block in range(self.num_blocks):
                    offset = builder.add(
                        builder.mul(loop.index, INT(_ROW_BYTES)), builder.mul(source_stride, INT(block * TILE))
                    )
                    self._load(self.num_sums + block, builder.add(source, offset), source_stride)
                step = builder.add(weights, builder.mul(loop.index, INT(self.step_bytes)))
                for column in range(self.num_columns):
                    self._add_products(step, first, column, widened)
                with builder.if_then(fetches):
                    share = self.step_bytes // self.num_blocks
                    place = builder.add(ahead, builder.mul(loop.index, INT(self.step_bytes)))
                    fetch(builder, builder.add(place, INT(run * share)), share)
            for block in range(self.num_blocks):
                for column in range(self.num_columns):
                    offset = builder.mul(target_stride, INT(block * TILE))
                    place = builder.add(target, INT((first + column) * TILE * _NUMBER_BYTES))
                    arguments = [self._sum(block, column), self._at(builder.add(place, offset)), target_stride]
                    self._call("tilestored64", arguments)

    def _add_products(self, step: Any, first: int, column: int, widened: Any) -> None:
        """Add products with one tile of outputs to the sums of all blocks."""
        number = first + column
        tile = self.first_weight + column % (_TILES - self.first_weight)
        if widened is None:
            self._load(tile, self.builder.add(step, INT(number * TILE * _ROW_BYTES)), INT(_ROW_BYTES))
        else:
            start = self.builder.gep(widened, [WORD(0), WORD(column * TILE)])
            self._widen(step, number, start)
            self._load(tile, self.builder.ptrtoint(start, INT), INT(_ROW_BYTES))
        for block in range(self.num_blocks):
            self._call("tdpbf16ps", [self._sum(block, column), _BYTE(self.num_sums + block), _BYTE(tile)])

    def _widen(self, step: Any, number: int, start: Any) -> None:
        """Write a tile of 8-bit weights in bfloat16, which holds them exactly."""
        builder = self.builder
        with cgutils.for_range(builder, INT(TILE)) as loop:
            pair = builder.add(step, builder.mul(loop.index, INT(2 * TILE)))
            words = []
            for side in range(2):
                place = self._at(builder.add(pair, INT(number * 2 * TILE * TILE + side * TILE)))
                loaded = builder.load(builder.bitcast(place, _BYTE_VECTOR.as_pointer()))
                loaded.align = 1
                numbers = builder.sitofp(builder.sext(loaded, WORDS), VECTOR)
                words.append(builder.bitcast(numbers, WORDS))
            # The lower halves of these words are zero.
            lowered = builder.lshr(words[0], ir.Constant(WORDS, [16] * LANES))
            both = builder.bitcast(builder.or_(lowered, words[1]), VECTOR)
            builder.store(both, builder.gep(start, [loop.index]))

    def configure(self, num_rows: Any) -> None:
        """Give every tile its rows, of 64 bytes."""
        builder = self.builder
        room = cgutils.alloca_once(builder, ir.ArrayType(_BYTE, _CONFIGURATION_BYTES))
        builder.store(ir.Constant(room.type.pointee, None), room)
        builder.store(_BYTE(1), builder.gep(room, [WORD(0), WORD(0)]))
        last = builder.sub(num_rows, INT((self.num_blocks - 1) * TILE))
        for tile in range(_TILES):
            place = builder.gep(room, [WORD(0), WORD(_WIDTHS_AT + 2 * tile)])
            builder.store(_SHORT(_ROW_BYTES), builder.bitcast(place, _SHORT.as_pointer())).align = 1
            block = tile // self.num_columns if tile < self.num_sums else tile - self.num_sums
            is_last = tile < self.first_weight and block == self.num_blocks - 1
            rows = builder.trunc(last, _BYTE) if is_last else _BYTE(TILE)
            builder.store(rows, builder.gep(room, [WORD(0), WORD(_ROWS_AT + tile)]))
        self._call("ldtilecfg", [builder.bitcast(room, BYTES)])

    def release(self) -> None:
        """Free all tiles."""
        self._call("tilerelease", [])

    def _sum(self, block: int, column: int) -> Any:
        return _BYTE(block * self.num_columns + column)

    def _load(self, tile: int, address: Any, stride: Any) -> None:
        self._call("tileloadd64", [_BYTE(tile), self._at(address), stride])

    def _at(self, address: Any) -> Any:
        return self.builder.inttoptr(address, BYTES)

    def _call(self, name: str, arguments: list[Any]) -> None:
        kind = ir.FunctionType(ir.VoidType(), [one.type for one in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.x86.{name}")
        self.builder.call(function, arguments)


def _call(num_blocks: int, is_bytes: bool) -> Callable[..., None]:
    """Intrinsic for the rows of `num_blocks` tiles, the last one not full.

    Its arguments are the address and stride of the inputs, the address of the panel, its number of tiles of inputs, the
    address and stride of the result, the address to fetch from meanwhile, and whether to do so.
    """

    @intrinsic
    def add_products(
        _typing: Any,
        source: Any,
        source_stride: Any,
        weights: Any,
        num_tiles: Any,
        target: Any,
        target_stride: Any,
        ahead: Any,
        fetches: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            # Elsewhere no code is found for the instructions.
            if MULTIPLIES_TILES:
                kinds = [types.int64] * (len(arguments) - 1) + [types.boolean]
                pairs = zip(arguments, signature.args, kinds, strict=True)
                numbers = [context.cast(builder, value, given, kind) for value, given, kind in pairs]
                _AmxCode(builder, num_blocks, is_bytes).generate(numbers)
            return context.get_dummy_value()

        some = source, source_stride, weights, num_tiles, target, target_stride, ahead, fetches
        return types.void(*some), generate

    return add_products


def _set_up(num_blocks: int) -> Any:
    """Intrinsic that gives this thread's tiles their rows, for rows of `num_blocks` tiles."""

    @intrinsic
    def configure(_typing: Any, num_rows: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            if MULTIPLIES_TILES:
                rows = context.cast(builder, arguments[0], signature.args[0], types.int64)
                _AmxCode(builder, num_blocks, is_bytes=False).configure(rows)
            return context.get_dummy_value()

        return types.void(num_rows), generate

    return configure


def _release_tiles(_typing: Any) -> Any:
    """Free this thread's tiles."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        if MULTIPLIES_TILES:
            _AmxCode(builder, 1, is_bytes=False).release()
        return context.get_dummy_value()

    return types.void(), generate


_few_rows, _many_rows = _set_up(1), _set_up(2)
_release: Any = intrinsic(_release_tiles)
_few, _many = _call(1, False), _call(2, False)
_few_bytes, _many_bytes = _call(1, True), _call(2, True)
