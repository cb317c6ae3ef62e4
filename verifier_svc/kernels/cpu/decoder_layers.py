"""Compiled decoder layers of the Llama family: consecutive layers run in one call, shared by several threads.

A layer has eight phases (`_PHASES`), each cut into pieces for threads (`shared_work.py`). Every number of a row is
computed by one thread, from that row alone and in a fixed order: bits depend neither on the other rows of the pass nor
on the number of threads.

Axes: N rows, L layers, h hidden size, H query heads, K key heads, D head size, B block size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coppice.kernels.cpu.compiler import compiled_exactly
from coppice.kernels.cpu.exponentials import exact_exponentials
from coppice.kernels.cpu.half_tables import FloatArray
from coppice.kernels.cpu.norms import exact_rms_norm
from verifier_svc.kernels.cpu.attention import RaggedRows, attend_rows, store_rows
from verifier_svc.kernels.cpu.panel_products import (
    PANEL,
    Inputs,
    Panels,
    address,
    begin_products,
    end_products,
    multiply_panel,
    put_inputs,
)
from verifier_svc.kernels.cpu.shared_work import CounterArray, done, take, wait_for

IntArray = npt.NDArray[np.int64]

# Input norm, q-k-v, positions, attention, output, norm, gate and up, down.
_PHASES = 8
SILU, GELU_TANH = 0, 1
_GELU_SCALE, _GELU_CUBE = np.float32(2 * np.sqrt(2 / np.pi)), np.float32(0.044715)
# exp overflows above this in single precision.
_HIGHEST = np.float32(88)


class Matrices(NamedTuple):
    """Weights of one product in all layers.

    `panels` [L, panels, ...]; `scales` of outputs [L, panels * PANEL], or [L, 0] without; `biases` likewise.
    """

    panels: Panels
    scales: FloatArray
    biases: FloatArray


class LayerWeights(NamedTuple):
    """Weights of all layers. Norms that a model lacks are [L, 0].

    `gate_up` alternates panels of both, gate first. `scales` and `windows` [L] of attention; window 0 is none.
    """

    input_norms: FloatArray
    qkv: Matrices
    query_norms: FloatArray
    key_norms: FloatArray
    scales: FloatArray
    windows: IntArray
    output: Matrices
    after_attention: FloatArray
    mlp_norms: FloatArray
    gate_up: Matrices
    down: Matrices
    after_mlp: FloatArray


class Rotation(NamedTuple):
    """Cosines and sines of the rows' positions [N, D]."""

    cos: FloatArray
    sin: FloatArray


class Buffers(NamedTuple):
    """Buffers for the rows of a pass. Inputs of products are in single precision, or in bfloat16 for panels of pairs.

    `normed` [N, h]; `qkv`, `change` and `gate_up` [N, panels * PANEL]; `query` [N, H, D]; `key` and `value` [N, K, D];
    `seen` [N, H, D] and its view `seen_rows` [N, H * D]; `gated` [N, panels * PANEL].
    """

    normed: Inputs
    qkv: FloatArray
    query: FloatArray
    key: FloatArray
    value: FloatArray
    seen: Inputs
    seen_rows: Inputs
    change: FloatArray
    gate_up: FloatArray
    gated: Inputs


@compiled_exactly
def num_phases(num_layers: int) -> int:
    """Number of phases of `num_layers` layers."""
    return num_layers * _PHASES + 1


@compiled_exactly
def run_layers(
    weights: LayerWeights,
    first: int,
    last: int,
    epsilon: float,
    activation: int,
    hidden: FloatArray,
    rotation: Rotation,
    keys: FloatArray,
    values: FloatArray,
    rows: RaggedRows,
    slots: IntArray,
    buffers: Buffers,
    shown: IntArray,
    states: FloatArray,
    counters: CounterArray,
) -> None:
    """Run layers from `first` to `last` (excluded), shared by all threads that call this with the same arguments.

    Args:
        weights: of all layers.
        first: the first layer.
        last: the one after the last.
        epsilon: of the norms.
        activation: `SILU` or `GELU_TANH`.
        hidden: the layers' input [N, h], overwritten with their output.
        rotation: of the rows.
        keys: [L, blocks, K, D, B].
        values: [L, blocks, K, B, D].
        rows: visibility.
        slots: of the rows' keys and values; padding has none.
        buffers: scratch.
        shown: layers whose inputs are kept, `last` for the output, in order.
        states: these inputs [len(shown), N, h].
        counters: of `num_phases(last - first)` phases, zeroed.
    """
    scratch = np.empty((2, max(hidden.shape[1], buffers.query.shape[2])), np.float32)
    nothing = np.empty(0, np.float32)
    phase = at = 0
    for layer in range(first, last):
        state = states[at : at + 1] if at < len(shown) and shown[at] == layer else states[:0]
        at += len(state)
        output, gate_up, down = weights.output.panels[layer], weights.gate_up.panels[layer], weights.down.panels[layer]
        after = weights.qkv.panels[min(layer + 1, last - 1)]
        before = weights.after_mlp[max(first, layer - 1)]
        norm = weights.input_norms[layer]
        share_norms(hidden, layer > first, before, norm, epsilon, scratch, state, buffers, counters, phase)
        share_product(buffers.normed, weights.qkv, layer, buffers.qkv, counters, phase + 1, output)
        norms = weights.query_norms[layer], weights.key_norms[layer]
        share_turns(norms, epsilon, rotation, keys[layer], values[layer], slots, scratch, buffers, counters, phase + 2)
        scale, window = weights.scales[layer], weights.windows[layer]
        attend_rows(buffers.query, keys[layer], values[layer], rows, scale, window, buffers.seen, counters, phase + 3)
        share_product(buffers.seen_rows, weights.output, layer, buffers.change, counters, phase + 4, gate_up)
        before, norm = weights.after_attention[layer], weights.mlp_norms[layer]
        share_norms(hidden, True, before, norm, epsilon, scratch, states[:0], buffers, counters, phase + 5)
        share_gates(weights.gate_up, layer, activation, buffers, counters, phase + 6, down)
        share_product(buffers.gated, weights.down, layer, buffers.change, counters, phase + 7, after)
        phase += _PHASES
    before = weights.after_mlp[last - 1]
    share_norms(hidden, True, before, nothing, epsilon, scratch, states[at:], buffers, counters, phase)


@compiled_exactly
def run_whole(
    weights: LayerWeights,
    last_norm: FloatArray,
    head: Matrices,
    epsilon: float,
    activation: int,
    hidden: FloatArray,
    rotation: Rotation,
    keys: FloatArray,
    values: FloatArray,
    rows: RaggedRows,
    slots: IntArray,
    buffers: Buffers,
    shown: IntArray,
    states: FloatArray,
    logit_rows: IntArray,
    logits: FloatArray,
    counters: CounterArray,
) -> None:
    """`run_layers` for all layers, then the last norm and the output layer for some rows.

    Args:
        last_norm: [h].
        head: weights of the output layer, of one layer.
        logit_rows: the rows [K].
        logits: [K, panels * PANEL], written.
        counters: of `num_phases(L) + 2` phases, zeroed.
    """
    last, kept = len(weights.qkv.panels), len(logit_rows)
    run_layers(
        weights,
        0,
        last,
        epsilon,
        activation,
        hidden,
        rotation,
        keys,
        values,
        rows,
        slots,
        buffers,
        shown,
        states,
        counters,
    )
    phase = num_phases(last)
    scratch = np.empty((1, hidden.shape[1]), np.float32)
    at = take(counters, phase)
    while at < kept:
        put_normed(hidden[logit_rows[at]], last_norm, epsilon, scratch, buffers.normed[at])
        done(counters, phase)
        at = take(counters, phase)
    wait_for(counters, phase, kept)
    share_product(buffers.normed[:kept], head, 0, logits, counters, phase + 1, head.panels[0])


@compiled_exactly
def share_norms(
    hidden: FloatArray,
    has_change: bool,
    change_norm: FloatArray,
    norm: FloatArray,
    epsilon: float,
    scratch: FloatArray,
    state: FloatArray,
    buffers: Buffers,
    counters: CounterArray,
    phase: int,
) -> None:
    """Add the change by attention or an MLP to rows, and norm them as inputs of products: one phase, a row a piece.

    With norms of width 0, changes are added unnormed, and no inputs are made. `state` [1, N, h] keeps the rows; [0, N,
    h] does not.
    """
    row = take(counters, phase)
    while row < len(hidden):
        if has_change:
            add_change(hidden[row], buffers.change[row], change_norm, epsilon, scratch)
        if len(state) > 0:
            state[0, row] = hidden[row]
        if len(norm) > 0:
            put_normed(hidden[row], norm, epsilon, scratch, buffers.normed[row])
        done(counters, phase)
        row = take(counters, phase)
    wait_for(counters, phase, len(hidden))


@compiled_exactly
def share_turns(
    norms: tuple[FloatArray, FloatArray],
    epsilon: float,
    rotation: Rotation,
    keys: FloatArray,
    values: FloatArray,
    slots: IntArray,
    scratch: FloatArray,
    buffers: Buffers,
    counters: CounterArray,
    phase: int,
) -> None:
    """Queries, and keys and values in the cache, from products: one phase, a row a piece. `norms` as in `turn_row`."""
    num_rows = len(buffers.qkv)
    row = take(counters, phase)
    while row < num_rows:
        turn_row(row, norms[0], norms[1], epsilon, rotation, scratch, buffers)
        if row < len(slots):
            some = slice(row, row + 1)
            store_rows(keys, values, buffers.key[some], buffers.value[some], slots[some])
        else:
            buffers.seen_rows[row] = 0
        done(counters, phase)
        row = take(counters, phase)
    wait_for(counters, phase, num_rows)


@compiled_exactly
def share_product(
    inputs: Inputs,
    matrices: Matrices,
    layer: int,
    result: FloatArray,
    counters: CounterArray,
    phase: int,
    following: Panels,
) -> None:
    """`result` [N, panels * PANEL] = rows [N, in] times a layer's weights: one phase, a panel a piece.

    `following` are the panels that are needed after these.
    """
    panels = matrices.panels[layer]
    begin_products(inputs, panels)
    before, panel = -1, take(counters, phase)
    while panel < len(panels):
        ahead = next_address(panels, panel, panel - before, following)
        multiply_panel(inputs, panels, panel, matrices.scales[layer], matrices.biases[layer], result, ahead)
        done(counters, phase)
        before, panel = panel, take(counters, phase)
    end_products(inputs, panels)
    wait_for(counters, phase, len(panels))


@compiled_exactly
def next_address(panels: Panels, panel: int, step: int, following: Panels) -> int:
    """Address of the panel that a thread likely needs next, if threads go on taking panels in turn."""
    panel += step
    return address(panels, panel) if panel < len(panels) else address(following, panel - len(panels))


@compiled_exactly
def share_gates(
    matrices: Matrices,
    layer: int,
    activation: int,
    buffers: Buffers,
    counters: CounterArray,
    phase: int,
    following: Panels,
) -> None:
    """`gated` = activation(gate) * up: one phase, a panel of both a piece. `following` as in `share_product`."""
    panels, scales, biases = matrices.panels[layer], matrices.scales[layer], matrices.biases[layer]
    num_pieces = len(panels) // 2
    powers = np.empty(PANEL, np.float32)
    begin_products(buffers.normed, panels)
    before, piece = -1, take(counters, phase)
    while piece < num_pieces:
        gates, ups = 2 * piece, 2 * piece + 1
        multiply_panel(buffers.normed, panels, gates, scales, biases, buffers.gate_up, address(panels, ups))
        ahead = next_address(panels, gates, 2 * (piece - before), following)
        multiply_panel(buffers.normed, panels, ups, scales, biases, buffers.gate_up, ahead)
        begin, target = gates * PANEL, piece * PANEL
        for row in range(len(buffers.gate_up)):
            gate, up = (
                buffers.gate_up[row, begin : begin + PANEL],
                buffers.gate_up[row, begin + PANEL : begin + 2 * PANEL],
            )
            activate(gate, activation, powers)
            for column in range(PANEL):
                powers[column] *= up[column]
            put_inputs(powers, buffers.gated[row, target : target + PANEL])
        done(counters, phase)
        before, piece = piece, take(counters, phase)
    end_products(buffers.normed, panels)
    wait_for(counters, phase, num_pieces)


@compiled_exactly
def activate(numbers: FloatArray, activation: int, result: FloatArray) -> None:
    """SiLU, x / (1 + exp(-x)), or GELU by tanh, which is x / (1 + exp(-2u)) with u the argument of the tanh."""
    if activation == SILU:
        for index in range(len(numbers)):
            result[index] = min(-numbers[index], _HIGHEST)
    else:
        for index in range(len(numbers)):
            x = numbers[index]
            result[index] = min(-_GELU_SCALE * (x + _GELU_CUBE * x * x * x), _HIGHEST)
    exact_exponentials(result, np.float32(0))
    for index in range(len(numbers)):
        result[index] = numbers[index] / (np.float32(1) + result[index])


@compiled_exactly
def add_change(hidden: FloatArray, change: FloatArray, norm: FloatArray, epsilon: float, scratch: FloatArray) -> None:
    """Add the change by attention or an MLP to a row [h], normed if the model does so."""
    width = len(hidden)
    if len(norm) > 0:
        scratch[0, :width] = change[:width]
        exact_rms_norm(scratch[:1, :width], norm, epsilon, scratch[1:, :width])
        for column in range(width):
            hidden[column] += scratch[1, column]
    else:
        for column in range(width):
            hidden[column] += change[column]


@compiled_exactly
def put_normed(row: FloatArray, norm: FloatArray, epsilon: float, scratch: FloatArray, target: Inputs) -> None:
    """The RMS norm of a row [h], as an input of products."""
    width = len(row)
    exact_rms_norm(row.reshape(1, width), norm, epsilon, scratch[:1, :width])
    put_inputs(scratch[0, :width], target)


@compiled_exactly
def turn_row(
    row: int,
    query_norm: FloatArray,
    key_norm: FloatArray,
    epsilon: float,
    rotation: Rotation,
    scratch: FloatArray,
    buffers: Buffers,
) -> None:
    """Queries and keys of a row, normed if the model does so and rotated to its position, and its values."""
    heads, size = buffers.query.shape[1:]
    kv_heads = buffers.key.shape[1]
    numbers = buffers.qkv[row]
    cos, sin = rotation.cos[row], rotation.sin[row]
    for head in range(heads):
        some = numbers[head * size : (head + 1) * size]
        turn(some, query_norm, epsilon, cos, sin, scratch, buffers.query[row, head])
    for head in range(kv_heads):
        begin = (heads + head) * size
        turn(numbers[begin : begin + size], key_norm, epsilon, cos, sin, scratch, buffers.key[row, head])
        begin += kv_heads * size
        buffers.value[row, head] = numbers[begin : begin + size]


@compiled_exactly
def turn(
    numbers: FloatArray,
    norm: FloatArray,
    epsilon: float,
    cos: FloatArray,
    sin: FloatArray,
    scratch: FloatArray,
    result: FloatArray,
) -> None:
    """Norm, if the model does so, and rotate one head [D]."""
    size = len(numbers)
    if len(norm) > 0:
        # Scratch, because norms cannot be made in place.
        scratch[0, :size] = numbers
        exact_rms_norm(scratch[:1, :size], norm, epsilon, scratch[1:, :size])
        rotate(scratch[1, :size], cos, sin, result)
    else:
        rotate(numbers, cos, sin, result)


@compiled_exactly
def rotate(numbers: FloatArray, cos: FloatArray, sin: FloatArray, result: FloatArray) -> None:
    """x * cos + (swapped halves of x, the first negated) * sin, of one head [D]."""
    half = len(numbers) // 2
    for index in range(half):
        low, high = numbers[index], numbers[half + index]
        result[index] = low * cos[index] - high * sin[index]
        result[half + index] = high * cos[half + index] + low * sin[half + index]
