"""A draft step or a piece of a prompt in one compiled call: a Llama pass over a few rows, with 8-bit weights.

A draft is a chain of short steps of one to four rows. Sixty calls of a tensor library cost more than their arithmetic,
especially after the target's pass, which leaves caches cold. Numba compiles this file's loops into one function, which
reads each weight once, in 8 bits.

Axes: R new rows, S cached rows, H query heads, K key heads, D head size, L layers, h hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba.extending import overload
from transformers import LlamaForCausalLM

from coppice.draft_models.kernels.base import Rows
from coppice.draft_models.kernels.cpu.int8_inputs import arrange, multiply_bytes
from coppice.draft_models.kernels.cpu.int8_weights import Weights, multiply_floats, quantise
from coppice.kernels.cpu.compiler import compiled
from coppice.kernels.cpu.exponentials import exponentials
from coppice.kernels.cpu.norms import rms_norm

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class FewRowsWeights(NamedTuple):
    """All weights of a step. Layers are stacked along the first axis."""

    embedding: FloatArray
    cos: FloatArray
    signed_sin: FloatArray
    input_norms: FloatArray
    qkv: Weights
    output: Weights
    mlp_norms: FloatArray
    gate_up: Weights
    down: Weights
    norm: FloatArray
    head: Weights


class LayerMatrices(NamedTuple):
    """Matrices of one layer, and the norm before its MLP [h]."""

    qkv: Weights
    output: Weights
    mlp_norm: FloatArray
    gate_up: Weights
    down: Weights


class FewRowsPass:
    """8-bit copy of a Llama's weights, and the pass over it.

    `cos` and `signed_sin` [positions, D] rotate queries and keys: x * cos + roll(x, D / 2) * signed sin. `round_inputs`
    also rounds the matrices' inputs to 8 bits, which needs `int8_inputs.is_available()`.
    """

    def __init__(self, model: LlamaForCausalLM, cos: FloatArray, signed_sin: FloatArray, *, round_inputs: bool) -> None:
        self._weights = read_weights(model, cos, signed_sin, round_inputs)
        self._heads = model.config.num_attention_heads
        self._eps = model.config.rms_norm_eps

    def run(self, kv: FloatArray, length: int, rows: Rows) -> FloatArray:
        """Append rows to the first `length` of `kv` [L, 2, K, capacity, D]; returns logits [num_logits, V]."""
        return run_rows(
            self._weights,
            kv,
            length,
            rows.token_ids,
            rows.positions,
            rows.mask,
            rows.num_logits,
            self._heads,
            self._eps,
        )


def read_weights(
    model: LlamaForCausalLM, cos: FloatArray, signed_sin: FloatArray, round_inputs: bool
) -> FewRowsWeights:
    """Copy and quantise the weights of a Llama."""
    layers = list(model.model.layers)

    def matrices(weight: FloatArray) -> Weights:
        return arrange(quantise(weight)) if round_inputs else quantise(weight)

    def stack(*names: str) -> FloatArray:
        """The named matrices of each layer, concatenated by rows and stacked over layers."""
        joined = [np.concatenate([_array(layer.get_submodule(name).weight) for name in names]) for layer in layers]
        return np.stack(joined)

    return FewRowsWeights(
        embedding=_array(model.model.embed_tokens.weight),
        cos=cos,
        signed_sin=signed_sin,
        input_norms=stack("input_layernorm"),
        qkv=matrices(stack("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        output=matrices(stack("self_attn.o_proj")),
        mlp_norms=stack("post_attention_layernorm"),
        gate_up=matrices(stack("mlp.gate_proj", "mlp.up_proj")),
        down=matrices(stack("mlp.down_proj")),
        norm=_array(model.model.norm.weight),
        head=matrices(_array(model.lm_head.weight)),
    )


def _array(parameter: Any) -> FloatArray:
    array: FloatArray = parameter.detach().float().cpu().contiguous().numpy()
    return array


def multiply(inputs: FloatArray, values: npt.NDArray[Any], scales: FloatArray, results: FloatArray) -> None:
    """`results` [R, out] = `inputs` [R, in] times the transpose of a matrix with 8-bit `values` and `scales` [out].

    Values arranged by `int8_inputs` are unsigned. Compiled code chooses at compile time.
    """
    way = multiply_bytes if values.dtype == np.uint8 else multiply_floats
    way(inputs, values, scales, results)


@overload(multiply, strict=False)
def _choose_multiply(inputs: Any, values: Any, scales: Any, results: Any) -> Callable[..., None]:
    way = multiply_bytes if values.dtype.name == "uint8" else multiply_floats
    return lambda inputs, values, scales, results: way(inputs, values, scales, results)


@compiled
def run_rows(
    weights: FewRowsWeights,
    kv: FloatArray,
    length: int,
    token_ids: IntArray,
    positions: IntArray,
    mask: FloatArray,
    num_logits: int,
    heads: int,
    eps: float,
) -> FloatArray:
    """Append rows to a cache and return the logits [num_logits, V] of the last ones.

    Args:
        weights: the model.
        kv: keys and values [L, 2, K, capacity, D] with `length` valid rows; the new ones are written.
        length: S.
        token_ids: [R].
        positions: [R].
        mask: [R, S + R]; negative where a row does not see another.
        num_logits: number of rows whose logits are returned.
        heads: H.
        eps: the epsilon of the norms.
    """
    rows, layers = len(token_ids), kv.shape[0]
    width = weights.embedding.shape[1]
    hidden = np.empty((rows, width), np.float32)
    normed = np.empty((rows, width), np.float32)
    for row in range(rows):
        hidden[row] = weights.embedding[token_ids[row]]
    for layer in range(layers):
        rms_norm(hidden, weights.input_norms[layer], eps, normed)
        matrices = LayerMatrices(
            Weights(weights.qkv.values[layer], weights.qkv.scales[layer]),
            Weights(weights.output.values[layer], weights.output.scales[layer]),
            weights.mlp_norms[layer],
            Weights(weights.gate_up.values[layer], weights.gate_up.scales[layer]),
            Weights(weights.down.values[layer], weights.down.scales[layer]),
        )
        run_layer(
            matrices, hidden, normed, kv[layer], length, weights.cos, weights.signed_sin, positions, mask, heads, eps
        )
    last = hidden[rows - num_logits :]
    final = np.empty((num_logits, width), np.float32)
    rms_norm(last, weights.norm, eps, final)
    logits = np.empty((num_logits, len(weights.head.scales)), np.float32)
    multiply(final, weights.head.values, weights.head.scales, logits)
    return logits


@compiled
def run_layer(
    matrices: LayerMatrices,
    hidden: FloatArray,
    normed: FloatArray,
    kv: FloatArray,
    length: int,
    cos: FloatArray,
    signed_sin: FloatArray,
    positions: IntArray,
    mask: FloatArray,
    heads: int,
    eps: float,
) -> None:
    """One layer, whose result is added to `hidden` [R, h].

    Args:
        matrices: the layer's.
        hidden: the rows before attention, written.
        normed: attention's input [R, in].
        kv: keys and values [2, K, capacity, D] with `length` valid rows; the new ones are written.
        length: S.
        cos: by position [positions, D].
        signed_sin: by position [positions, D].
        positions: [R].
        mask: [R, S + R]; negative where a row does not see another.
        heads: H.
        eps: the epsilon of the norms.
    """
    rows, width = hidden.shape
    size = kv.shape[3]
    inner = len(matrices.gate_up.scales) // 2
    change = np.empty((rows, width), np.float32)
    seen = np.empty((rows, heads * size), np.float32)
    gate_up = np.empty((rows, 2 * inner), np.float32)
    gated = np.empty((rows, inner), np.float32)
    qkv = keep_rows(matrices, normed, kv, length, cos, signed_sin, positions, heads)
    attend(qkv, kv, mask, heads, length + rows, seen)
    multiply(seen, matrices.output.values, matrices.output.scales, change)
    hidden += change
    after = np.empty((rows, width), np.float32)
    rms_norm(hidden, matrices.mlp_norm, eps, after)
    multiply(after, matrices.gate_up.values, matrices.gate_up.scales, gate_up)
    for row in range(rows):
        gate, up, result = gate_up[row, :inner], gate_up[row, inner:], gated[row]
        result[:] = -gate
        exponentials(result)
        for column in range(inner):
            result[column] = gate[column] / (np.float32(1) + result[column]) * up[column]
    multiply(gated, matrices.down.values, matrices.down.scales, change)
    hidden += change


@compiled
def keep_rows(
    matrices: LayerMatrices,
    normed: FloatArray,
    kv: FloatArray,
    first: int,
    cos: FloatArray,
    signed_sin: FloatArray,
    positions: IntArray,
    heads: int,
) -> FloatArray:
    """Write the keys and values of rows from place `first` on; returns queries, keys and values [R, (H + 2K) * D].

    `normed` [R, in] is attention's input; otherwise as for `run_layer`.
    """
    rows, kv_heads, size = len(normed), kv.shape[1], kv.shape[3]
    qkv = np.empty((rows, (heads + 2 * kv_heads) * size), np.float32)
    multiply(normed, matrices.qkv.values, matrices.qkv.scales, qkv)
    for row in range(rows):
        own_cos, own_sin = cos[positions[row]], signed_sin[positions[row]]
        for head in range(heads + kv_heads):
            turn(qkv[row, head * size : (head + 1) * size], own_cos, own_sin)
        for head in range(kv_heads):
            start = (heads + head) * size
            kv[0, head, first + row] = qkv[row, start : start + size]
            start += kv_heads * size
            kv[1, head, first + row] = qkv[row, start : start + size]
    return qkv


@compiled
def turn(vector: FloatArray, cos: FloatArray, signed_sin: FloatArray) -> None:
    """Rotary position, in place: x * cos + roll(x, D / 2) * signed sin."""
    half = len(vector) // 2
    for index in range(half):
        low, high = vector[index], vector[half + index]
        vector[index] = low * cos[index] + high * signed_sin[index]
        vector[half + index] = high * cos[half + index] + low * signed_sin[half + index]


@compiled
def attend(qkv: FloatArray, kv: FloatArray, mask: FloatArray, heads: int, end: int, results: FloatArray) -> None:
    """`results` [R, H * D]: softmax attention of the queries in `qkv` to the first `end` keys of `kv` [2, K, C, D]."""
    rows, kv_heads, size = qkv.shape[0], kv.shape[1], kv.shape[3]
    group = heads // kv_heads
    scale = np.float32(1 / np.sqrt(size))
    weights = np.empty(end, np.float32)
    for row in range(rows):
        for head in range(heads):
            keys, values = kv[0, head // group], kv[1, head // group]
            query = qkv[row, head * size : (head + 1) * size]
            highest = np.float32(-np.inf)
            for key in range(end):
                score = np.float32(0)
                for index in range(size):
                    score += query[index] * keys[key, index]
                score = score * scale + mask[row, key]
                weights[key] = score
                highest = max(highest, score)
            total = np.float32(0)
            weights -= highest
            exponentials(weights)
            for key in range(end):
                total += weights[key]
            result = results[row, head * size : (head + 1) * size]
            mix(weights, values, result)
            for index in range(size):
                result[index] /= total


@compiled
def mix(weights: FloatArray, values: FloatArray, result: FloatArray) -> None:
    """`result` [D] = `weights` [keys] times the first so many of `values` [C, D]."""
    result[:] = 0
    keys, size = len(weights), len(result)
    whole = keys // 4 * 4
    # Four keys at a time, to load and store the result less often.
    for key in range(0, whole, 4):
        w0, w1, w2, w3 = weights[key], weights[key + 1], weights[key + 2], weights[key + 3]
        v0, v1, v2, v3 = values[key], values[key + 1], values[key + 2], values[key + 3]
        for index in range(size):
            result[index] += w0 * v0[index] + w1 * v1[index] + w2 * v2[index] + w3 * v3[index]
    for key in range(whole, keys):
        for index in range(size):
            result[index] += weights[key] * values[key, index]
