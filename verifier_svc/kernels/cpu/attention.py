"""Compiled tree attention on CPUs: reads the paged cache in place; every row's result is independent of others.

Strict equality of plain and speculative decoding needs sums that do not depend on the other rows of a pass. Library
kernels choose their order by shape. Here each row adds its products one after the other along its own path, in single
precision and without reordering (`compiled_exactly`): the bits are the same in every batch, by the rules of
floating-point arithmetic.

Speed comes from the layout: a block holds its keys transposed, [dim, BLOCK_SIZE], so that one loop scores all keys of
a block in parallel and still adds each key's products in order.

Axes: N rows, H query heads, K key heads, D head size, B block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coppice.core.tree import ROOT
from coppice.kernels.cpu.compiler import compiled_exactly
from coppice.kernels.cpu.exponentials import exact_exponentials
from coppice.kernels.cpu.lane_sums import LANES, lane_max, lane_sum
from verifier_svc.engine.kv_cache import BLOCK_SIZE, IntArray
from verifier_svc.engine.pass_plan import PassPlan, Segment
from verifier_svc.kernels.base import AttentionRule, KernelLimitError
from verifier_svc.kernels.cpu.aligned_arrays import aligned_rows, aligned_zeros
from verifier_svc.kernels.cpu.exact_products import Products, add_products
from verifier_svc.kernels.cpu.panel_products import Inputs, put_inputs
from verifier_svc.kernels.cpu.shared_work import CounterArray, SharedThreads, done, new_counters, take, wait_for

FloatArray = npt.NDArray[np.float32]

# Scores per layer (about a millisecond) above which several threads pay.
_WORTH_THREADS = 2**18
# Most rows of a segment that read a block of keys together while it is in the L1 cache; from so many rows on there are
# at least two groups, so that threads have equal work over few key heads.
_ROWS_TOGETHER = 8
_ROWS_APART = 4


class RaggedRows(NamedTuple):
    """Segments of a plan as flat arrays.

    Segment s has rows from `starts[s]` to `starts[s + 1]`, `contexts[s]` cached tokens, and its blocks are `tables`
    from `table_starts[s]` to `table_starts[s + 1]`, ends excluded. A row sees the context, the first `runs` places
    after it, and those in `tails` from `tail_starts[row]` to `tail_starts[row + 1]`. Neither it nor a row before it in
    its segment sees a place from `ends[row]` on.
    """

    starts: IntArray
    contexts: IntArray
    table_starts: IntArray
    tables: IntArray
    runs: IntArray
    ends: IntArray
    tail_starts: IntArray
    tails: IntArray


class HeadGroup(NamedTuple):
    """Rows `first` to `last` (excluded) of a segment, for the query heads of one key head.

    `context` tokens are cached, `begin` is the first position that any row sees, rounded down to a block, and `table`
    the segment's blocks, read from `first_block` to `last_block` (excluded).
    """

    first: int
    last: int
    context: int
    begin: int
    first_block: int
    last_block: int
    table: IntArray
    head: int


class Work(NamedTuple):
    """Scratch for a few rows of one key head.

    Queries [rows, D], scores [rows, positions], totals [rows] of their weights, sums [rows, value size].
    """

    queries: FloatArray
    scores: FloatArray
    totals: FloatArray
    sums: FloatArray


class CompiledKernel:
    """Keys [blocks, K, D, B] and values [blocks, K, B, D] of every layer, in single precision."""

    def __init__(self) -> None:
        self._num_blocks = 0
        self._buffers: dict[int, tuple[FloatArray, FloatArray]] = {}
        self._stacked: tuple[FloatArray, FloatArray] | None = None
        self.rows = ragged_rows(())
        self.write_slots = np.empty(0, np.int64)
        # Upper bound of the plan's row-key pairs, from its blocks.
        self._num_scores = 0
        self.threads = SharedThreads()
        # Last rule of each layer.
        self.rules: dict[int, AttentionRule] = {}

    @property
    def bytes_per_slot(self) -> int:
        """Bytes per token over all layers seen so far."""
        total = sum(keys.nbytes + values.nbytes for keys, values in self._buffers.values())
        return total // max(1, self._num_blocks * BLOCK_SIZE)

    def allocate(self, num_blocks: int) -> None:
        """Allocate this many blocks, dropping contents."""
        self._num_blocks = num_blocks
        self._buffers = {}
        self._stacked = None

    def begin(self, plan: PassPlan, sources: IntArray, destinations: IntArray) -> None:
        """Move slots and begin a pass."""
        if len(sources):
            for keys, values in self._buffers.values():
                move_slots(keys, values, sources, destinations)
        self.rows = ragged_rows(plan.segments)
        self.write_slots = plan.write_slots
        self._num_scores = sum((part.stop - part.start) * len(part.table) * BLOCK_SIZE for part in plan.segments)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """See `AttentionKernel`; supports plain softmax in single precision, with or without a window."""
        if any(part is not None for part in (rule.softcap, rule.sinks, rule.chunk, rule.slopes)):
            raise KernelLimitError("the compiled kernel supports neither soft caps, sinks, chunks nor slopes")
        if query.dtype != torch.float32 or query.device.type != "cpu":
            raise KernelLimitError("the compiled kernel needs single precision on a CPU")
        self.rules[layer] = rule
        keys, values = self._layer(layer, key, value)
        store_rows(keys, values, _rows_first(key), _rows_first(value), self.write_slots)
        output = torch.zeros(query.shape[1], query.shape[0], value.shape[-1])
        window = rule.sliding_window or 0
        arguments = (_rows_first(query), keys, values, self.rows, np.float32(rule.scale), window, output.numpy())
        is_much = self._num_scores * query.shape[0] >= _WORTH_THREADS
        self.threads.call(attend_rows, torch.get_num_threads() if is_much else 1, *arguments, new_counters(1), 0)
        return output

    def stacked_layers(self, num_layers: int, kv_heads: int, size: int) -> tuple[FloatArray, FloatArray]:
        """Keys [L, blocks, K, D, B] and values [L, blocks, K, B, D] of layers with equal shapes."""
        if self._stacked is None:
            keys = aligned_zeros(num_layers, self._num_blocks, kv_heads, size, BLOCK_SIZE)
            values = aligned_zeros(num_layers, self._num_blocks, kv_heads, BLOCK_SIZE, size)
            self._stacked = keys, values
            self._buffers = {layer: (keys[layer], values[layer]) for layer in range(num_layers)}
        return self._stacked

    def _layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[FloatArray, FloatArray]:
        buffers = self._buffers.get(layer)
        if buffers is None:
            blocks, kv_heads = self._num_blocks, key.shape[0]
            # Zeros: unused keys of a block are scored too, and must be finite.
            keys = aligned_zeros(blocks, kv_heads, key.shape[-1], BLOCK_SIZE)
            values = aligned_zeros(blocks, kv_heads, BLOCK_SIZE, value.shape[-1])
            buffers = self._buffers[layer] = keys, values
        return buffers


def ragged_rows(segments: Sequence[Segment]) -> RaggedRows:
    """Segments as flat arrays."""
    runs: list[int] = []
    ends: list[int] = []
    tails: list[int] = []
    tail_starts = [0]
    for segment in segments:
        pending = segment.num_pending
        # No array in the usual case: creating one costs more than the loop.
        places = range(segment.stop - segment.start) if segment.places is None else segment.places.tolist()
        runs += range(1, pending + 1)
        ends += [place + 1 for place in places]
        tail_starts += [len(tails)] * pending
        paths: list[list[int]] = []
        for node, parent in enumerate(segment.parents):
            paths.append([*(paths[parent] if parent != ROOT else ()), places[pending + node]])
            runs.append(pending)
            tails += paths[node]
            tail_starts.append(len(tails))
    tables = [segment.table for segment in segments]
    return RaggedRows(
        starts=np.array([*(segment.start for segment in segments), len(runs)], np.int64),
        contexts=np.array([segment.num_context for segment in segments], np.int64),
        table_starts=np.cumsum([0, *(len(table) for table in tables)]),
        tables=np.concatenate([np.empty(0, np.int64), *tables]),
        runs=np.array(runs, np.int64),
        ends=np.array(ends, np.int64),
        tail_starts=np.array(tail_starts, np.int64),
        tails=np.array(tails, np.int64),
    )


def _rows_first(tensor: Tensor) -> FloatArray:
    """[heads, N, dim] as a contiguous array [N, heads, dim]."""
    array: FloatArray = tensor.transpose(0, 1).contiguous().numpy()
    return array


@compiled_exactly
def store_rows(
    keys: FloatArray, values: FloatArray, new_keys: FloatArray, new_values: FloatArray, slots: IntArray
) -> None:
    """Write `new_keys` and `new_values` [N, K, D] to `slots`; padding rows have none."""
    for row in range(len(slots)):
        block, place = slots[row] // BLOCK_SIZE, slots[row] % BLOCK_SIZE
        for head in range(keys.shape[1]):
            keys[block, head, :, place] = new_keys[row, head]
            values[block, head, place] = new_values[row, head]


@compiled_exactly
def move_slots(keys: FloatArray, values: FloatArray, sources: IntArray, destinations: IntArray) -> None:
    """Move keys and values. No slot is read after being written: a sequence's rows move forwards, in order."""
    for index in range(len(sources)):
        old_block, old_place = sources[index] // BLOCK_SIZE, sources[index] % BLOCK_SIZE
        block, place = destinations[index] // BLOCK_SIZE, destinations[index] % BLOCK_SIZE
        for head in range(keys.shape[1]):
            keys[block, head, :, place] = keys[old_block, head, :, old_place]
            values[block, head, place] = values[old_block, head, old_place]


@compiled_exactly
def attend_rows(
    query: FloatArray,
    keys: FloatArray,
    values: FloatArray,
    rows: RaggedRows,
    scale: np.float32,
    window: int,
    output: Inputs,
    counters: CounterArray,
    phase: int,
) -> None:
    """Softmax attention of every row: one phase; a piece is a key head and a few rows that read it together.

    Args:
        query: [N, H, D].
        keys: [blocks, K, D, B].
        values: [blocks, K, B, value size].
        rows: visibility.
        scale: of the scores.
        window: number of last positions that a row sees; 0 for all.
        output: [N, H, value size], written.
        counters: see `shared_work.py`.
        phase: index of the phase.
    """
    kv_heads = keys.shape[1]
    most_blocks = 1
    num_pieces = 0
    for segment in range(len(rows.contexts)):
        most_blocks = max(most_blocks, rows.table_starts[segment + 1] - rows.table_starts[segment])
        num_pieces += num_groups(rows, segment) * kv_heads
    together = _ROWS_TOGETHER * (query.shape[1] // kv_heads)
    work = Work(
        aligned_rows(together, query.shape[2]),
        aligned_rows(together, most_blocks * BLOCK_SIZE),
        np.empty(together, np.float32),
        aligned_rows(together, output.shape[2]),
    )
    piece = take(counters, phase)
    segment, before = 0, 0
    while piece < num_pieces:
        # All rows read a head's keys and values while these are cached.
        while piece >= before + num_groups(rows, segment) * kv_heads:
            before += num_groups(rows, segment) * kv_heads
            segment += 1
        groups = num_groups(rows, segment)
        start, num_rows = rows.starts[segment], rows.starts[segment + 1] - rows.starts[segment]
        first = start + (piece - before) % groups * num_rows // groups
        last = start + ((piece - before) % groups + 1) * num_rows // groups
        context = rows.contexts[segment]
        begin = first_key(rows, segment, first, last, window)
        last_block = (context + rows.ends[last - 1] + BLOCK_SIZE - 1) // BLOCK_SIZE
        table = rows.tables[rows.table_starts[segment] : rows.table_starts[segment + 1]]
        head = (piece - before) // groups
        some = HeadGroup(first, last, context, begin, begin // BLOCK_SIZE, last_block, table, head)
        attend_group(query, keys, values, rows, some, scale, window, work, output)
        done(counters, phase)
        piece = take(counters, phase)
    wait_for(counters, phase, num_pieces)


@compiled_exactly
def num_groups(rows: RaggedRows, segment: int) -> int:
    """Number of groups of a segment's rows, which are of about equal size."""
    num_rows = rows.starts[segment + 1] - rows.starts[segment]
    fewest = 2 if num_rows >= _ROWS_APART else 1
    return int(max(fewest, (num_rows + _ROWS_TOGETHER - 1) // _ROWS_TOGETHER))


@compiled_exactly
def attend_group(
    query: FloatArray,
    keys: FloatArray,
    values: FloatArray,
    rows: RaggedRows,
    some: HeadGroup,
    scale: np.float32,
    window: int,
    work: Work,
    output: Inputs,
) -> None:
    """`attend_rows` for some rows and one key head."""
    group = query.shape[1] // keys.shape[1]
    score_rows(query, keys, some, scale, work)
    for index in range((some.last - some.first) * group):
        weigh(rows, some, some.first + index // group, window, work.scores[index], work.totals, index)
    sum_values(values, rows, some, work, output)


@compiled_exactly
def first_key(rows: RaggedRows, segment: int, first: int, last: int, window: int) -> int:
    """Start of the first block that any of these rows sees."""
    if window <= 0:
        return 0
    begin = visible_keys(rows, segment, first)
    for row in range(first + 1, last):
        begin = min(begin, visible_keys(rows, segment, row))
    begin = max(0, begin - window)
    return int(begin - begin % BLOCK_SIZE)


@compiled_exactly
def score_rows(query: FloatArray, keys: FloatArray, some: HeadGroup, scale: np.float32, work: Work) -> None:
    """Scores of a group's rows by position, from its `begin` on."""
    group = query.shape[1] // keys.shape[1]
    count = (some.last - some.first) * group
    for index in range(count):
        row, head = some.first + index // group, some.head * group + index % group
        for place in range(query.shape[2]):
            work.queries[index, place] = query[row, head, place] * scale
    for block in range(some.first_block, some.last_block):
        start = block * BLOCK_SIZE
        work.scores[:count, start : start + BLOCK_SIZE] = 0
        which = Products(0, count, start, BLOCK_SIZE, 0, 0, query.shape[2])
        add_products(work.queries, keys[some.table[block], some.head], work.scores, which)


@compiled_exactly
def sum_values(values: FloatArray, rows: RaggedRows, some: HeadGroup, work: Work, output: Inputs) -> None:
    """Weighted means of the values seen by a group's rows.

    All rows add all places up to the last one that any of them sees, in order: a weight of 0 changes no bit of a sum.
    """
    group = output.shape[1] // values.shape[1]
    count = (some.last - some.first) * group
    size = output.shape[2]
    work.sums[:count] = 0
    end = some.context + rows.ends[some.last - 1]
    for block in range(some.first_block, some.last_block):
        start = block * BLOCK_SIZE
        which = Products(0, count, 0, size, start, 0, min(BLOCK_SIZE, end - start))
        add_products(work.scores, values[some.table[block], some.head], work.sums, which)
    for index in range(count):
        sums, total = work.sums[index], work.totals[index]
        for column in range(size):
            sums[column] /= total
        put_inputs(sums, output[some.first + index // group, some.head * group + index % group])


@compiled_exactly
def end_of_lanes(position: int) -> int:
    """The next multiple of LANES."""
    return (position + LANES - 1) // LANES * LANES


@compiled_exactly
def visible_keys(rows: RaggedRows, segment: int, row: int) -> int:
    """Number of keys that a row sees, without windows."""
    tail = rows.tail_starts[row + 1] - rows.tail_starts[row]
    return int(rows.contexts[segment] + rows.runs[row] + tail)


@compiled_exactly
def weigh(
    rows: RaggedRows, some: HeadGroup, row: int, window: int, scores: FloatArray, totals: FloatArray, index: int
) -> None:
    """Turn a row's scores of its segment's positions into exp(score - max), and those that it does not see into 0.

    Their total is added up along the row's path, as without the places that other rows have there.
    """
    context, begin, end = some.context, some.begin, some.context + rows.ends[some.last - 1]
    run, tail, last_tail = context + rows.runs[row], rows.tail_starts[row], rows.tail_starts[row + 1]
    place = run
    for at in range(tail, last_tail):
        # Tails are ascending and at or after their target, so none is overwritten early.
        scores[place] = scores[context + rows.tails[at]]
        place += 1
    lowest = begin if window <= 0 else max(begin, place - window)
    last_lane = end_of_lanes(place)
    scores[begin:lowest] = -np.inf
    scores[place:last_lane] = -np.inf
    exact_exponentials(scores[begin:last_lane], lane_max(scores[begin:last_lane]))
    scores[begin:lowest] = 0
    scores[place : max(last_lane, end)] = 0
    totals[index] = lane_sum(scores[begin:last_lane])
    while place > run and context + rows.tails[last_tail - 1] >= place:
        # Back to its place, the last one first.
        last_tail, place = last_tail - 1, place - 1
        weight = scores[place]
        scores[place] = 0
        scores[context + rows.tails[last_tail]] = weight
