"""Matrix products with rows rounded to 8 bits, by AVX-512 VNNI.

Converting weights to floats costs more than multiplying them with four rows. VNNI needs no floats: one instruction
multiplies 64 unsigned bytes with 64 signed ones and adds groups of four to 16 sums. A weight w is stored as w + 128, so
sums start at -128 times the sum of the row.

Numba does not generate this instruction, so `_add_products` does, in LLVM IR.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import binding, ir
from numba.core import types
from numba.extending import intrinsic

from coppice.draft_models.kernels.cpu.int8_weights import Weights
from coppice.kernels.cpu.compiler import compiled
from coppice.kernels.cpu.vector_code import LANES, cgutils, in_every_lane

FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.int8]
SumArray = npt.NDArray[np.int32]

# Outputs per block: 32-bit sums of a register, each fed by four inputs at a time.
_OUTPUTS = LANES
_INPUTS = 4
_OFFSET = 128
_LARGEST = np.float32(127)
_SMALLEST_SCALE = np.float32(1e-30)
# Numba's configuration is untyped.
config: Any = numba.config
_INSTRUCTION = "llvm.x86.avx512.vpdpbusd.512"


def is_available() -> bool:
    """Whether the CPU has the instruction, and Numba compiles for this CPU."""
    return not config.CPU_NAME and not config.CPU_FEATURES and binding.get_host_cpu_features().get("avx512vnni", False)


def arrange(weights: Weights) -> Weights:
    """Weights in multiplication order: [..., blocks, in / 4, 16 outputs, 4 inputs], plus 128.

    Outputs and inputs are padded with zeros.
    """
    *stack, outputs, inputs = weights.values.shape
    blocks, steps = -(-outputs // _OUTPUTS), -(-inputs // _INPUTS)
    filled = np.full((*stack, blocks * _OUTPUTS, steps * _INPUTS), _OFFSET, np.uint8)
    filled[..., :outputs, :inputs] = weights.values.astype(np.int16) + _OFFSET
    split = filled.reshape(*stack, blocks, _OUTPUTS, steps, _INPUTS)
    return Weights(np.ascontiguousarray(np.swapaxes(split, -3, -2)), weights.scales)


@compiled
def multiply_bytes(inputs: FloatArray, values: npt.NDArray[np.uint8], scales: FloatArray, results: FloatArray) -> None:
    """`results` [R, out] = `inputs` [R, in], rounded, times the transpose of arranged `values` with `scales` [out]."""
    rows, outputs = results.shape
    blocks, steps = values.shape[:2]
    rounded = np.zeros((rows, steps * _INPUTS), np.int8)
    row_scales = np.empty(rows, np.float32)
    starts = np.empty(rows, np.int32)
    round_rows(inputs, rounded, row_scales, starts)
    sums = np.empty((rows, _OUTPUTS), np.int32)
    for block in range(blocks):
        for row in range(rows):
            sums[row] = starts[row]
        row = 0
        while row + 8 <= rows:
            _add_8(values[block], rounded[row : row + 8], sums[row : row + 8])
            row += 8
        if row + 4 <= rows:
            _add_4(values[block], rounded[row : row + 4], sums[row : row + 4])
            row += 4
        if row + 2 <= rows:
            _add_2(values[block], rounded[row : row + 2], sums[row : row + 2])
            row += 2
        if row < rows:
            _add_1(values[block], rounded[row:], sums[row:])
        first = block * _OUTPUTS
        for row in range(rows):
            for place in range(min(_OUTPUTS, outputs - first)):
                scale = row_scales[row] * scales[first + place]
                results[row, first + place] = np.float32(sums[row, place]) * scale


@compiled
def round_rows(inputs: FloatArray, rounded: ByteArray, scales: FloatArray, starts: SumArray) -> None:
    """Round each row to multiples of its own scale; `starts` are the sums that undo the weights' offset."""
    rows, width = inputs.shape
    for row in range(rows):
        largest = _SMALLEST_SCALE
        for column in range(width):
            largest = max(largest, abs(inputs[row, column]))
        factor = _LARGEST / largest
        total = np.int32(0)
        for column in range(width):
            value = np.int32(np.rint(inputs[row, column] * factor))
            rounded[row, column] = value
            total += value
        scales[row] = largest / _LARGEST
        starts[row] = -_OFFSET * total


def _add_products(rows: int) -> Callable[[npt.NDArray[np.uint8], ByteArray, SumArray], None]:
    """Function for compiled code that adds one block's products with exactly `rows` rows to their sums.

    Takes weights [steps, 16, 4], inputs [rows, 4 * steps] and sums [rows, 16], all contiguous.
    """

    @intrinsic
    def add(typing_context: Any, weights: types.Array, inputs: types.Array, sums: types.Array) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            word, index = ir.IntType(32), ir.IntType(64)
            words = ir.VectorType(word, _OUTPUTS)
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(words, [words, words, words]), _INSTRUCTION
            )
            weights_, inputs_, sums_ = (
                context.make_array(kind)(context, builder, value)
                for kind, value in zip(signature.args, arguments, strict=True)
            )
            steps = cgutils.unpack_tuple(builder, weights_.shape)[0]
            all_weights = builder.bitcast(weights_.data, words.as_pointer())
            all_inputs = builder.bitcast(inputs_.data, word.as_pointer())
            all_sums = builder.bitcast(sums_.data, words.as_pointer())
            places = [builder.gep(all_sums, [ir.Constant(index, row)]) for row in range(rows)]
            # Stack variables, which LLVM promotes to registers.
            totals = [cgutils.alloca_once(builder, words) for _ in range(rows)]
            for total, place in zip(totals, places, strict=True):
                builder.store(builder.load(place, align=4), total)
            with cgutils.for_range(builder, steps) as loop:
                weight = builder.load(builder.gep(all_weights, [loop.index]), align=1)
                for row, total in enumerate(totals):
                    place = builder.add(builder.mul(steps, ir.Constant(index, row)), loop.index)
                    four = builder.load(builder.gep(all_inputs, [place]), align=1)
                    added = builder.call(function, [builder.load(total), weight, in_every_lane(builder, four)])
                    builder.store(added, total)
            for total, place in zip(totals, places, strict=True):
                builder.store(builder.load(total), place, align=4)
            return context.get_dummy_value()

        return types.void(weights, inputs, sums), generate

    # Outside compiled code the decorated function takes no arguments.
    return cast(Any, add)  # type: ignore[no-any-return]


_add_1, _add_2, _add_4, _add_8 = _add_products(1), _add_products(2), _add_products(4), _add_products(8)
