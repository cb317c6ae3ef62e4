"""Device code of products with experts' weights, in Triton: tiles of one size, of rows that chose one expert.

A row's product does not depend on how many rows chose its expert, nor on its place in a tile: tiles are always whole,
no argument but pointers varies, and every sum has one order.

Import fails without Triton. With TRITON_INTERPRET=1 in the environment, the code runs in Triton's interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply_tiles(
    inputs: tl.tensor,
    weights: tl.tensor,
    biases: tl.tensor,
    order: tl.tensor,
    experts: tl.tensor,
    firsts: tl.tensor,
    stops: tl.tensor,
    output: tl.tensor,
    CHOSEN: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    HAS_BIASES: tl.constexpr,
) -> None:
    """Output [choices, OUTPUTS]; grid (tiles, parts of COLUMNS outputs). A choice is a row and one of its experts.

    Choice i has row i // CHOSEN of the inputs [rows, INPUTS]. `order` [choices] sorts choices by expert; tile t has
    those from `firsts[t]` to `stops[t]` there, at most ROWS, and weights of `experts[t]`: [OUTPUTS, INPUTS] for each,
    or [INPUTS, OUTPUTS] if transposed, and biases [OUTPUTS]. All are contiguous.
    """
    tile = tl.program_id(0)
    expert = tl.load(experts + tile).to(tl.int64)
    first, stop = tl.load(firsts + tile), tl.load(stops + tile)
    place = first + tl.arange(0, ROWS)
    is_row = place < stop
    choice = tl.load(order + place, mask=is_row, other=0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < OUTPUTS
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    # Tiles without rows read nothing.
    for start in tl.range(0, tl.where(first < stop, INPUTS, 0), DEPTH):
        depth = start + tl.arange(0, DEPTH)
        is_depth = depth < INPUTS
        rows = tl.load(
            inputs + (choice // CHOSEN)[:, None] * INPUTS + depth[None, :],
            mask=is_row[:, None] & is_depth[None, :],
            other=0.0,
        )
        if IS_TRANSPOSED:
            place_of_weight = depth[:, None] * OUTPUTS + column[None, :]
        else:
            place_of_weight = column[None, :] * INPUTS + depth[:, None]
        columns = tl.load(
            weights + expert * (INPUTS * OUTPUTS) + place_of_weight,
            mask=is_depth[:, None] & is_column[None, :],
            other=0.0,
        )
        total = tl.dot(rows, columns, total, input_precision="ieee")
    if HAS_BIASES:
        total += tl.load(biases + expert * OUTPUTS + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(
        output + choice[:, None] * OUTPUTS + column[None, :],
        total.to(output.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )
