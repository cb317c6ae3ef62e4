"""Sums and maxima in a fixed order, in vector registers: equal inputs give equal bits at any position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from coppice.kernels.cpu.compiler import compiled_exactly
from coppice.kernels.cpu.vector_code import (
    BYTES,
    INT,
    LANES,
    NUMBER_BYTES,
    VECTOR,
    WORD,
    WORDS,
    cgutils,
    unaligned,
)

FloatArray = npt.NDArray[np.float32]

__all__ = ["LANES", "lane_max", "lane_sum"]


def _reduced(combine: Callable[[Any, Any, Any], Any], first: float) -> Any:
    """Intrinsic: numbers [a multiple of LANES], contiguous, combined per lane, and the lanes by halves."""

    def reduction(_typing: Any, numbers: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            array = cgutils.create_struct_proxy(signature.args[0])(context, builder, arguments[0])
            data = builder.bitcast(array.data, BYTES)
            count = builder.udiv(array.nitems, INT(LANES))
            total = cgutils.alloca_once_value(builder, ir.Constant(VECTOR, [first] * LANES))
            with cgutils.for_range(builder, count) as loop:
                place = builder.gep(data, [builder.mul(loop.index, INT(LANES * NUMBER_BYTES))])
                some = unaligned(builder.load(builder.bitcast(place, VECTOR.as_pointer())))
                builder.store(combine(builder, builder.load(total), some), total)
            lanes = builder.load(total)
            width = LANES // 2
            while width > 0:
                order = ir.Constant(WORDS, [(lane + width) % LANES for lane in range(LANES)])
                lanes = combine(builder, lanes, builder.shuffle_vector(lanes, lanes, order))
                width //= 2
            return builder.extract_element(lanes, WORD(0))

        return types.float32(numbers), generate

    return intrinsic(reduction)


def _sum(builder: Any, one: Any, other: Any) -> Any:
    return builder.fadd(one, other)


def _larger(builder: Any, one: Any, other: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", other, one), other, one)


_lane_sum = _reduced(_sum, 0.0)
_lane_max = _reduced(_larger, float("-inf"))


@compiled_exactly
def lane_sum(numbers: FloatArray) -> np.float32:
    """Sum of `numbers` [a multiple of LANES], contiguous: one partial sum per lane, then pairwise."""
    return np.float32(_lane_sum(numbers))


@compiled_exactly
def lane_max(numbers: FloatArray) -> np.float32:
    """Maximum of `numbers` [a multiple of LANES], contiguous."""
    return np.float32(_lane_max(numbers))
