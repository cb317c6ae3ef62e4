"""Compiled recurrences with a matrix as state, over token trees: the gated delta rule and Mamba's.

A row's state follows from its parent's: S = a P + k (b (v - k (a P)))^T by the gated delta rule (Gated Delta Networks,
arXiv 2412.06464, section 3), S = a P + k (b v)^T by Mamba-2's (arXiv 2405.21060, section 3); its output is q S. The
decay a is a number of a head, or of each key (Kimi Delta Attention, arXiv 2510.26692, section 3), or exp(-rate * b) of
each entry (Mamba-1, arXiv 2312.00752, section 3). Sums over keys are added in order, one after the other, so a row's
bits depend on its path alone (`compiled_exactly`). Loops over values are vectors.

Axes: N rows, H heads, G groups of heads that share queries and keys, K key size, V value size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coppice.kernels.cpu.compiler import compiled_exactly
from verifier_svc.engine.kv_cache import IntArray
from verifier_svc.kernels.cpu.shared_work import CounterArray, done, take, wait_for

FloatArray = npt.NDArray[np.float32]


class RowInputs(NamedTuple):
    """Queries and keys [N, G, K], values [N, H, V]; `corrects` tells the delta rule.

    Decays [N, H, 1 or K]. Steps b [N, H, 1], or [N, H, V] with `rates` [H, K, V], which then give the decays.
    """

    queries: FloatArray
    keys: FloatArray
    values: FloatArray
    decays: FloatArray
    steps: FloatArray
    rates: FloatArray
    corrects: bool


class TreeRows(NamedTuple):
    """Rows of a pass, as in `RowForest`; `border_of_row` [rows] are slots that keep the state after a row, or -1."""

    starts: IntArray
    num_pending: IntArray
    slots: IntArray
    parents: IntArray
    border_of_row: IntArray


@compiled_exactly
def advance_tree(
    inputs: RowInputs,
    rows: TreeRows,
    states: FloatArray,
    after: FloatArray,
    output: FloatArray,
    counters: CounterArray,
    phase: int,
) -> None:
    """Outputs of all rows: one phase; a piece is a segment and a head.

    Args:
        inputs: of all rows.
        rows: trees.
        states: by slot [slots, H, K, V]; only slots of borders are written.
        after: states after each segment's pending tokens [segments, H, K, V], written.
        output: [N, H, V], written for rows of segments.
        counters: see `shared_work.py`.
        phase: index of the phase.
    """
    heads, keys, size = states.shape[1], states.shape[2], states.shape[3]
    num_pieces = len(rows.num_pending) * heads
    most_nodes = 0
    for segment in range(len(rows.num_pending)):
        count = rows.starts[segment + 1] - rows.starts[segment] - rows.num_pending[segment]
        most_nodes = max(most_nodes, count)
    nodes = np.empty((most_nodes, keys, size), np.float32)
    work = np.empty(size, np.float32)
    piece = take(counters, phase)
    while piece < num_pieces:
        segment, head = piece // heads, piece % heads
        current = after[segment, head]
        if rows.slots[segment] < 0:
            current[:] = 0
        else:
            current[:] = states[rows.slots[segment], head]
        start, stop = rows.starts[segment], rows.starts[segment + 1]
        first_node = start + rows.num_pending[segment]
        for row in range(start, first_node):
            advance(inputs, row, head, current, current, work, output[row, head])
            if rows.border_of_row[row] >= 0:
                states[rows.border_of_row[row], head] = current
        for row in range(first_node, stop):
            parent = rows.parents[row]
            before = current if parent < first_node else nodes[parent - first_node]
            advance(inputs, row, head, before, nodes[row - first_node], work, output[row, head])
        done(counters, phase)
        piece = take(counters, phase)
    wait_for(counters, phase, num_pieces)


@compiled_exactly
def advance_path(
    inputs: RowInputs,
    paths: IntArray,
    path_starts: IntArray,
    slots: IntArray,
    segments: IntArray,
    states: FloatArray,
    after: FloatArray,
    counters: CounterArray,
    phase: int,
) -> None:
    """Write states after paths of nodes to slots: one phase; a piece is a path and a head.

    Path i has rows `paths` from `path_starts[i]` to `path_starts[i + 1]`, which follow the pending tokens of segment
    `segments[i]`; others as in `advance_tree`.
    """
    heads = states.shape[1]
    num_pieces = len(slots) * heads
    work = np.empty(states.shape[3], np.float32)
    output = np.empty(states.shape[3], np.float32)
    piece = take(counters, phase)
    while piece < num_pieces:
        path, head = piece // heads, piece % heads
        state = states[slots[path], head]
        state[:] = after[segments[path], head]
        for place in range(path_starts[path], path_starts[path + 1]):
            advance(inputs, paths[place], head, state, state, work, output)
        done(counters, phase)
        piece = take(counters, phase)
    wait_for(counters, phase, num_pieces)


@compiled_exactly
def advance(
    inputs: RowInputs,
    row: int,
    head: int,
    before: FloatArray,
    state: FloatArray,
    work: FloatArray,
    output: FloatArray,
) -> None:
    """One row's state [K, V] and output [V] from the state before it, which may be the same array."""
    group = head * inputs.keys.shape[1] // inputs.values.shape[1]
    queries, keys = inputs.queries[row, group], inputs.keys[row, group]
    if inputs.corrects:
        decay_and_correct(inputs, row, head, before, state, work)
    elif len(inputs.rates):
        decay_by_rates(inputs, row, head, before, state, work)
    else:
        decay_evenly(inputs, row, head, before, state, work)
    output[:] = 0
    for key in range(len(keys)):
        factor, query = keys[key], queries[key]
        for place in range(len(work)):
            updated = state[key, place] + work[place] * factor
            state[key, place] = updated
            output[place] += updated * query


@compiled_exactly
def decay_and_correct(
    inputs: RowInputs, row: int, head: int, before: FloatArray, state: FloatArray, work: FloatArray
) -> None:
    """Decay a state [K, V] by the delta rule; `work` [V] becomes what its keys are to be corrected by."""
    keys = inputs.keys[row, head * inputs.keys.shape[1] // inputs.values.shape[1]]
    values, decays, step = inputs.values[row, head], inputs.decays[row, head], inputs.steps[row, head, 0]
    work[:] = 0
    for key in range(len(keys)):
        factor, decay = keys[key], decays[min(key, len(decays) - 1)]
        for place in range(len(work)):
            decayed = before[key, place] * decay
            state[key, place] = decayed
            work[place] += decayed * factor
    for place in range(len(work)):
        work[place] = (values[place] - work[place]) * step


@compiled_exactly
def decay_evenly(
    inputs: RowInputs, row: int, head: int, before: FloatArray, state: FloatArray, work: FloatArray
) -> None:
    """Decay a state [K, V]; `work` [V] becomes what is added to it."""
    values, decays, step = inputs.values[row, head], inputs.decays[row, head], inputs.steps[row, head, 0]
    for key in range(len(before)):
        factor = decays[min(key, len(decays) - 1)]
        for place in range(len(work)):
            state[key, place] = before[key, place] * factor
    for place in range(len(work)):
        work[place] = values[place] * step


@compiled_exactly
def decay_by_rates(
    inputs: RowInputs, row: int, head: int, before: FloatArray, state: FloatArray, work: FloatArray
) -> None:
    """As `decay_evenly`, by the rate of each entry and the step of its column."""
    values, steps, rates = inputs.values[row, head], inputs.steps[row, head], inputs.rates[head]
    for key in range(len(before)):
        for place in range(len(work)):
            state[key, place] = before[key, place] * math.exp(-rates[key, place] * steps[place])
    for place in range(len(work)):
        work[place] = values[place] * steps[place]
