"""Shared code of compiled products: vectors, and a multiply-add in single precision, fused where possible.

Fused, the product is added exactly and the sum is rounded once. Either way each operation is written down, and no
compiler may take another one.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numba.core.cgutils
import numba.core.config
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

cgutils: Any = numba.core.cgutils

_CONFIG: Any = numba.core.config
_FEATURES: Any = llvmlite.binding.get_host_cpu_features()
HAS_WIDE_REGISTERS = bool(_FEATURES.get("avx512f"))
# Without a fused multiply-add the compiler would call a function for each.
HAS_FUSED = HAS_WIDE_REGISTERS or bool(_FEATURES.get("fma") or _FEATURES.get("neon"))

# Whether the processor multiplies pairs of bfloat16, and Numba compiles for this processor and no other.
MULTIPLIES_HALVES = (
    HAS_WIDE_REGISTERS and bool(_FEATURES.get("avx512bf16")) and not _CONFIG.CPU_NAME and not _CONFIG.CPU_FEATURES
)

# Numbers of a vector.
LANES = 16
NUMBER_BYTES = 4
# Bytes of a line of the processor's caches.
LINE_BYTES = 64
FLOAT, WORD, INT = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR, WORDS = ir.VectorType(FLOAT, LANES), ir.VectorType(WORD, LANES)
BYTES = ir.IntType(8).as_pointer()
_FIRST_LANE = ir.Constant(WORDS, [0] * LANES)
_FUSED = f"llvm.fma.v{LANES}f32"


def in_every_lane(builder: Any, number: Any) -> Any:
    """A vector of one number, of any type."""
    unknown = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(unknown, number, WORD(0)), unknown, _FIRST_LANE)


def with_product(builder: Any, sums: Any, factors: Any, numbers: Any) -> Any:
    """Sums plus factors times numbers, of vectors."""
    if not HAS_FUSED:
        return builder.fadd(sums, builder.fmul(factors, numbers))
    fused = cgutils.get_or_insert_function(builder.module, ir.FunctionType(VECTOR, [VECTOR] * 3), _FUSED)
    return builder.call(fused, [factors, numbers, sums])


def fetch(builder: Any, address: Any, num_bytes: int) -> None:
    """Read the lines from an address on into the processor's second cache, and go on meanwhile."""
    kind = ir.FunctionType(ir.VoidType(), [BYTES, WORD, WORD, WORD])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    for line in range(0, num_bytes, LINE_BYTES):
        place = builder.inttoptr(builder.add(address, INT(line)), BYTES)
        builder.call(prefetch, [place, WORD(0), WORD(2), WORD(1)])


def unpacked(context: Any, builder: Any, signature: Any, arguments: Any) -> tuple[list[Any], list[Any]]:
    """Arguments of generated code: three arrays, and the following numbers as 64-bit integers."""
    pairs = list(zip(signature.args, arguments, strict=True))
    arrays = [cgutils.create_struct_proxy(kind)(context, builder, value) for kind, value in pairs[:3]]
    numbers = [context.cast(builder, value, kind, types.int64) for kind, value in pairs[3:]]
    return arrays, numbers


def unaligned(access: Any) -> Any:
    """The same load or store of a vector, which may begin at any number."""
    access.align = NUMBER_BYTES
    return access


def _add_product(_typing: Any, total: Any, factor: Any, number: Any) -> Any:
    """The same for single numbers, for compiled code."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        if HAS_FUSED:
            return builder.fma(arguments[1], arguments[2], arguments[0])
        return builder.fadd(arguments[0], builder.fmul(arguments[1], arguments[2]))

    return types.float32(total, factor, number), generate


# total + factor * number, for compiled code alone.
add_product: Any = intrinsic(_add_product)


def _half_of(_typing: Any, number: Any) -> Any:
    """Bits of a number rounded to bfloat16, to nearest and ties to even, for compiled code."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        # Numba's own integers would be of 64 bits.
        bits = builder.bitcast(arguments[0], WORD)
        last = builder.and_(builder.lshr(bits, WORD(16)), WORD(1))
        rounded = builder.add(bits, builder.add(last, WORD(0x7FFF)))
        return builder.trunc(builder.lshr(rounded, WORD(16)), ir.IntType(16))

    return types.uint16(number), generate


def _number_of(_typing: Any, bits: Any) -> Any:
    """The single-precision number with these bits, for compiled code."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(context.cast(builder, arguments[0], signature.args[0], types.int32), FLOAT)

    return types.float32(bits), generate


half_of: Any = intrinsic(_half_of)
number_of: Any = intrinsic(_number_of)
