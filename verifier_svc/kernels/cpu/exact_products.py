"""Sums of products for a few rows at once in vector registers, each added up in order.

As loops over arrays, sums would be loaded and stored for every few products, which is two to three times slower. LLVM
gets multiply-adds of vectors (`vector_code.with_product`) without leave to reorder them (`compiler.compiled_exactly`):
every sum has the bits of adding one product after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba.core import types
from numba.extending import intrinsic

from coppice.kernels.cpu.compiler import compiled_exactly
from coppice.kernels.cpu.vector_code import (
    BYTES,
    FLOAT,
    INT,
    LANES,
    NUMBER_BYTES,
    VECTOR,
    add_product,
    cgutils,
    in_every_lane,
    unaligned,
    unpacked,
    with_product,
)

FloatArray = npt.NDArray[np.float32]

# Vectors per row of a wide tile.
_WIDE = 4


def _tile(num_rows: int, num_vectors: int) -> Callable[..., None]:
    """Intrinsic that adds products to one tile of sums: `num_rows` rows, and columns of `num_vectors` vectors.

    Its arguments are the three arrays, the first row, the first factor of `left`, the first row of `matrix`, the number
    of products, and the first columns of `matrix` and of `sums`.
    """

    @intrinsic
    def add(
        _typing: Any,
        left: Any,
        matrix: Any,
        sums: Any,
        row: Any,
        factor: Any,
        place: Any,
        count: Any,
        column: Any,
        target: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            proxies, numbers = unpacked(context, builder, signature, arguments)
            first, first_factor, first_place, num_products, first_column, first_target = numbers
            begins = [(first, first_factor), (first_place, first_column), (first, first_target)]
            matrices = tuple(_Matrix(builder, *pair) for pair in zip(proxies, begins, strict=True))
            _generate_tile(builder, matrices, num_products, num_rows, num_vectors)
            return context.get_dummy_value()

        return types.void(left, matrix, sums, row, factor, place, count, column, target), generate

    return add


class _Matrix:
    """Part of a two-dimensional float array in generated code, from some row and column on."""

    def __init__(self, builder: Any, array: Any, begin: tuple[Any, Any]) -> None:
        self._builder = builder
        self._strides = cgutils.unpack_tuple(builder, array.strides, 2)
        offsets = [builder.mul(stride, at) for stride, at in zip(self._strides, begin, strict=True)]
        self._data = builder.gep(builder.bitcast(array.data, BYTES), [builder.add(*offsets)])

    def row(self, row: Any) -> Any:
        """Address of a row."""
        return self._builder.gep(self._data, [self._builder.mul(self._strides[0], row)])

    def number(self, row: Any, column: Any) -> Any:
        """One number of the row at an address."""
        place = self._builder.gep(row, [self._builder.mul(self._strides[1], column)])
        return self._builder.load(self._builder.bitcast(place, FLOAT.as_pointer()))

    def vector(self, row: Any, vector: int) -> Any:
        """Address of a vector of contiguous numbers in the row at an address."""
        place = self._builder.gep(row, [INT(LANES * NUMBER_BYTES * vector)])
        return self._builder.bitcast(place, VECTOR.as_pointer())


def _generate_tile(builder: Any, matrices: tuple[_Matrix, ...], count: Any, num_rows: int, num_vectors: int) -> None:
    left, matrix, sums = matrices

    def load(address: Any) -> Any:
        return unaligned(builder.load(address))

    addresses = [[sums.vector(sums.row(INT(row)), at) for at in range(num_vectors)] for row in range(num_rows)]
    factors = [left.row(INT(row)) for row in range(num_rows)]
    before = builder.block
    loop, body, done = (builder.append_basic_block(name) for name in ("products", "product", "done"))
    start = [[load(address) for address in row] for row in addresses]
    builder.branch(loop)

    builder.position_at_end(loop)
    index = builder.phi(INT)
    index.add_incoming(INT(0), before)
    totals = [[builder.phi(VECTOR) for _ in row] for row in addresses]
    builder.cbranch(builder.icmp_signed("<", index, count), body, done)

    builder.position_at_end(body)
    row_of_matrix = matrix.row(index)
    numbers = [load(matrix.vector(row_of_matrix, at)) for at in range(num_vectors)]
    for row, row_totals in enumerate(totals):
        factor = in_every_lane(builder, left.number(factors[row], index))
        for at, total in enumerate(row_totals):
            total.add_incoming(start[row][at], before)
            total.add_incoming(with_product(builder, total, factor, numbers[at]), body)
    index.add_incoming(builder.add(index, INT(1)), body)
    builder.branch(loop)

    builder.position_at_end(done)
    for row, row_totals in enumerate(totals):
        for address, total in zip(addresses[row], row_totals, strict=True):
            unaligned(builder.store(total, address))


_four_wide, _two_wide, _one_wide = _tile(4, _WIDE), _tile(2, _WIDE), _tile(1, _WIDE)
_four, _two, _one = _tile(4, 1), _tile(2, 1), _tile(1, 1)


class Products(NamedTuple):
    """Ranges of a product: sums of rows `first` to `last` (excluded), in `num_columns` columns from `column` on.

    Each sum gets `num_products` products of the row's numbers from `factor` on and the matrix's rows from `place` on.
    """

    first: int
    last: int
    column: int
    num_columns: int
    factor: int
    place: int
    num_products: int


@compiled_exactly
def add_products(left: FloatArray, matrix: FloatArray, sums: FloatArray, which: Products) -> None:
    """Add products of `left` [rows, ...] and `matrix` [..., columns] to `sums` [rows, ...], each sum's in order.

    Rows of `matrix` and `sums` are contiguous. Ranges are passed instead of slices, whose cost is that of the products.
    """
    row = which.first
    while row < which.last:
        left_over = which.last - row
        step = 4 if left_over >= 4 else 2 if left_over >= 2 else 1
        _add_to_rows(left, matrix, sums, row, step, which)
        row += step


@compiled_exactly
def _add_to_rows(left: FloatArray, matrix: FloatArray, sums: FloatArray, row: int, step: int, which: Products) -> None:
    """For 4, 2 or 1 rows."""
    columns, factor, place, count = which.num_columns, which.factor, which.place, which.num_products
    column = 0
    while column + _WIDE * LANES <= columns:
        target = which.column + column
        if step == 4:
            _four_wide(left, matrix, sums, row, factor, place, count, column, target)
        elif step == 2:
            _two_wide(left, matrix, sums, row, factor, place, count, column, target)
        else:
            _one_wide(left, matrix, sums, row, factor, place, count, column, target)
        column += _WIDE * LANES
    while column + LANES <= columns:
        target = which.column + column
        if step == 4:
            _four(left, matrix, sums, row, factor, place, count, column, target)
        elif step == 2:
            _two(left, matrix, sums, row, factor, place, count, column, target)
        else:
            _one(left, matrix, sums, row, factor, place, count, column, target)
        column += LANES
    for at in range(row, row + step):
        for number in range(count):
            for last in range(column, columns):
                target = which.column + last
                sums[at, target] = add_product(
                    sums[at, target], left[at, factor + number], matrix[place + number, last]
                )
