"""Device code of tree attention in Triton: store new keys and values, attend to parts of a context, join the parts.

A row's result is a function of its own query and of the keys that it sees, by their places in its sequence. Tiles have
one size, a tile of keys is a block of the cache, and contexts are cut at fixed positions: invisible keys add exact
zeros, in every batch. Products and sums are not fused, so that both places that join parts round alike.

Import fails without Triton. With TRITON_INTERPRET=1 in the environment, the code runs on the CPU, in Triton's
interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_rows(
    key: tl.tensor,
    value: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    key_head_stride: tl.tensor,
    key_row_stride: tl.tensor,
    value_head_stride: tl.tensor,
    value_row_stride: tl.tensor,
    num_rows: tl.tensor,
    KEY_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write keys and values of ROWS rows to their slots; grid (rows / ROWS, key heads)."""
    row, head = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None], tl.program_id(1)
    slot = tl.load(slots + row, mask=row < num_rows, other=0).to(tl.int64)
    # Blocks are [key heads, BLOCK, size].
    place = (slot // BLOCK * KEY_HEADS + head) * BLOCK + slot % BLOCK
    column = tl.arange(0, WIDTH)[None, :]
    is_there = (row < num_rows) & (column < SIZE)
    new_keys = tl.load(key + head * key_head_stride + row * key_row_stride + column, mask=is_there)
    tl.store(keys + place * SIZE + column, new_keys, mask=is_there)
    column = tl.arange(0, VALUE_WIDTH)[None, :]
    is_there = (row < num_rows) & (column < VALUE_SIZE)
    new_values = tl.load(value + head * value_head_stride + row * value_row_stride + column, mask=is_there)
    tl.store(values + place * VALUE_SIZE + column, new_values, mask=is_there)


@triton.jit
def attend_items(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    part_sums: tl.tensor,
    part_weights: tl.tensor,
    num_items: tl.tensor,
    items: tl.tensor,
    positions: tl.tensor,
    bits: tl.tensor,
    tables: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    query_head_stride: tl.tensor,
    query_row_stride: tl.tensor,
    num_words: tl.tensor,
    FIELDS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Attention of a few rows to a part of their context, without the division by the sum of weights.

    Grid (any number, key heads x chunks of HEADS query heads): programs take items in turn, so that a captured launch
    serves any number of them. A tile has TILE places, for rows times HEADS heads.
    """
    chunks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    chunk = tl.program_id(1)
    key_head = chunk // chunks
    place = tl.arange(0, TILE)
    head_of_group = chunk % chunks * HEADS + place % HEADS
    head = key_head * GROUP + head_of_group
    column, value_column, lane = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH), tl.arange(0, BLOCK)
    for item in tl.range(tl.program_id(0), tl.load(num_items), tl.num_programs(0)):
        first_row = tl.load(items + item * FIELDS)
        num_rows = tl.load(items + item * FIELDS + 1)
        segment_row = tl.load(items + item * FIELDS + 2)
        context = tl.load(items + item * FIELDS + 3)
        num_pending = tl.load(items + item * FIELDS + 4)
        table = tl.load(items + item * FIELDS + 5)
        first_key = tl.load(items + item * FIELDS + 6)
        last_key = tl.load(items + item * FIELDS + 7)

        row = first_row + place // HEADS
        is_row = (place // HEADS < num_rows) & (head_of_group < GROUP)
        rows_query = tl.load(
            query + head[:, None] * query_head_stride + row[:, None] * query_row_stride + column[None, :],
            mask=is_row[:, None] & (column < SIZE)[None, :],
            other=0.0,
        )
        # A pending row sees all up to itself; a node sees the pending rows, and those in its bits.
        run = context + tl.minimum(row - segment_row + 1, num_pending)
        lowest = 0
        if HAS_WINDOW:
            position = tl.load(positions + row, mask=is_row, other=2147483647)
            lowest = tl.maximum(tl.min(position, 0) - window + 1, 0) // BLOCK * BLOCK

        best = tl.full([TILE], float("-inf"), tl.float32)
        weight = tl.zeros([TILE], tl.float32)
        sums = tl.zeros([TILE, VALUE_WIDTH], tl.float32)
        for split in tl.range(first_key, last_key, SPLIT):
            split_best = tl.full([TILE], float("-inf"), tl.float32)
            split_weight = tl.zeros([TILE], tl.float32)
            split_sums = tl.zeros([TILE, VALUE_WIDTH], tl.float32)
            for start in tl.range(tl.maximum(split, lowest), tl.minimum(split + SPLIT, last_key), BLOCK):
                block = tl.load(tables + table + start // BLOCK).to(tl.int64)
                places = (block * KEY_HEADS + key_head) * BLOCK + lane
                key = start + lane
                block_keys = tl.load(
                    keys + places[None, :] * SIZE + column[:, None],
                    mask=(key < last_key)[None, :] & (column < SIZE)[:, None],
                    other=0.0,
                )
                scores = tl.dot(rows_query, block_keys, input_precision=PRECISION) * scale
                if HAS_SOFTCAP:
                    # tanh by an exponential that cannot overflow.
                    fall = tl.exp(-2.0 * tl.abs(scores) / softcap)
                    bounded = softcap * (1.0 - fall) / (1.0 + fall)
                    scores = tl.where(scores < 0, -bounded, bounded)
                node = key - context - num_pending
                is_node = (node >= 0) & (key < last_key)
                word = tl.load(
                    bits + row[:, None] * num_words + (node // 32)[None, :],
                    mask=is_row[:, None] & is_node[None, :],
                    other=0,
                )
                visible = (key[None, :] < run[:, None]) | ((word >> (node & 31)[None, :]) & 1 == 1)
                visible = visible & (key < last_key)[None, :]
                if HAS_WINDOW:
                    # A node's position in the text differs from its place in the cache.
                    node_position = tl.load(positions + segment_row + num_pending + node, mask=is_node, other=0)
                    key_position = tl.where(is_node, node_position, key)
                    visible = visible & (position[:, None] - key_position[None, :] < window)
                scores = tl.where(visible, scores, float("-inf"))

                higher = tl.maximum(split_best, tl.max(scores, 1))
                # Avoids inf - inf before the first visible key.
                shift = tl.where(higher == float("-inf"), 0.0, higher)
                fade = tl.exp(split_best - shift)
                weights = tl.exp(scores - shift[:, None])
                split_weight = split_weight * fade + tl.sum(weights, 1)
                block_values = tl.load(
                    values + places[:, None] * VALUE_SIZE + value_column[None, :],
                    mask=(key < last_key)[:, None] & (value_column < VALUE_SIZE)[None, :],
                    other=0.0,
                )
                split_sums = tl.dot(
                    weights.to(block_values.dtype), block_values, split_sums * fade[:, None], input_precision=PRECISION
                )
                split_best = higher
            best, old, new = _join(best, split_best)
            weight = weight * old + split_weight * new
            sums = sums * old[:, None] + split_sums * new[:, None]

        part = (item * tl.num_programs(1) + chunk) * TILE + place
        tl.store(part_weights + part * 2, best)
        tl.store(part_weights + part * 2 + 1, weight)
        tl.store(
            part_sums + part[:, None] * VALUE_SIZE + value_column[None, :],
            sums,
            mask=(value_column < VALUE_SIZE)[None, :],
        )


@triton.jit
def join_parts(
    part_sums: tl.tensor,
    part_weights: tl.tensor,
    num_tiles: tl.tensor,
    tiles: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,
    FIELDS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """Output of tiles from their parts, in order; grid as for `attend_items`. Rows without a part become 0."""
    chunks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    chunk = tl.program_id(1)
    place = tl.arange(0, TILE)
    head_of_group = chunk % chunks * HEADS + place % HEADS
    head = chunk // chunks * GROUP + head_of_group
    column = tl.arange(0, VALUE_WIDTH)[None, :]
    for tile in tl.range(tl.program_id(0), tl.load(num_tiles), tl.num_programs(0)):
        first_row = tl.load(tiles + tile * FIELDS)
        num_rows = tl.load(tiles + tile * FIELDS + 1)
        first_item = tl.load(tiles + tile * FIELDS + 2)
        num_parts = tl.load(tiles + tile * FIELDS + 3)
        is_row = (place // HEADS < num_rows) & (head_of_group < GROUP)
        is_there = is_row[:, None] & (column < VALUE_SIZE)
        best = tl.full([TILE], float("-inf"), tl.float32)
        weight = tl.zeros([TILE], tl.float32)
        sums = tl.zeros([TILE, VALUE_WIDTH], tl.float32)
        for item in tl.range(first_item, first_item + num_parts):
            part = (item * tl.num_programs(1) + chunk) * TILE + place
            best, old, new = _join(best, tl.load(part_weights + part * 2))
            weight = weight * old + tl.load(part_weights + part * 2 + 1) * new
            part_sum = tl.load(part_sums + part[:, None] * VALUE_SIZE + column, mask=is_there, other=0.0)
            sums = sums * old[:, None] + part_sum * new[:, None]
        if HAS_SINKS:
            best, old, new = _join(best, tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32))
            weight = weight * old + new
            sums = sums * old[:, None]
        # Only padding has no part, and a weight of 0.
        mean = sums / tl.where(weight == 0, 1.0, weight)[:, None]
        row = first_row + place // HEADS
        begin = (row * (tl.num_programs(1) // chunks * GROUP) + head) * VALUE_SIZE
        tl.store(output + begin[:, None] + column, mean.to(output.dtype.element_ty), mask=is_there)


@triton.jit
def _join(best: tl.tensor, other: tl.tensor) -> tl.tuple:
    """The larger of two maxima, and factors that rescale sums of either to it."""
    higher = tl.maximum(best, other)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, tl.exp(best - shift), tl.exp(other - shift)
