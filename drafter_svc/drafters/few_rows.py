"""A draft step in one compiled call: a Llama's pass over a few rows, with weights of 8 bits.

A draft is a chain of short steps, each over a row or four. Sixty calls into a tensor library cost more than their
arithmetic then, above all right after the target's pass, which leaves every cache cold. Numba compiles this file's
loops to one function, which reads each weight once, as 8 bits.

Drafts are hints: 8-bit weights may cost a little acceptance, never a token.

Axes: R new rows, S cached rows, H query heads, K key heads, D head size, L layers, h hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import LlamaForCausalLM

from coppice.compiler import compiled
from drafter_svc.drafters.tree_cache import Rows

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_SMALLEST_SCALE = 1e-8


class Weights(NamedTuple):
    """A matrix or a stack of them, [..., out, in] in 8 bits, and one scale per output [..., out]."""

    values: npt.NDArray[np.int8]
    scales: FloatArray


class FewRowsWeights(NamedTuple):
    """Everything that a step reads. Layers are stacked along the first axis."""

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


class FewRowsPass:
    """A copy of a Llama's weights in 8 bits, and the pass over it.

    `cos` and `signed_sin` [positions, D] turn queries and keys: x * cos + roll(x, D / 2) * signed sin.
    """

    def __init__(self, model: LlamaForCausalLM, cos: FloatArray, signed_sin: FloatArray) -> None:
        self._weights = read_weights(model, cos, signed_sin)
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


def quantise(weight: FloatArray) -> Weights:
    """Symmetric 8-bit weights with one scale per output."""
    scales = np.maximum(np.abs(weight).max(-1) / 127, _SMALLEST_SCALE).astype(np.float32)
    return Weights(np.rint(weight / scales[..., None]).astype(np.int8), scales)


def read_weights(model: LlamaForCausalLM, cos: FloatArray, signed_sin: FloatArray) -> FewRowsWeights:
    """Copy and quantise the weights of a Llama."""
    layers = list(model.model.layers)

    def stack(*names: str) -> FloatArray:
        """For every layer, the matrices of the given names on top of each other."""
        matrices = [np.concatenate([_array(layer.get_submodule(name).weight) for name in names]) for layer in layers]
        return np.stack(matrices)

    return FewRowsWeights(
        embedding=_array(model.model.embed_tokens.weight),
        cos=cos,
        signed_sin=signed_sin,
        input_norms=stack("input_layernorm"),
        qkv=quantise(stack("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        output=quantise(stack("self_attn.o_proj")),
        mlp_norms=stack("post_attention_layernorm"),
        gate_up=quantise(stack("mlp.gate_proj", "mlp.up_proj")),
        down=quantise(stack("mlp.down_proj")),
        norm=_array(model.model.norm.weight),
        head=quantise(_array(model.lm_head.weight)),
    )


def _array(parameter: Any) -> FloatArray:
    array: FloatArray = parameter.detach().float().cpu().contiguous().numpy()
    return array


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
        kv: keys and values [L, 2, K, capacity, D], of which the first `length` rows count; the new ones are written.
        length: S.
        token_ids: [R].
        positions: [R].
        mask: [R, S + R]; a row does not see what has a negative value.
        num_logits: how many rows' logits are wanted.
        heads: H.
        eps: the epsilon of the norms.
    """
    rows, layers, kv_heads, size = len(token_ids), kv.shape[0], kv.shape[2], kv.shape[4]
    width = weights.embedding.shape[1]
    inner = weights.down.values.shape[2]
    hidden = np.empty((rows, width), np.float32)
    normed = np.empty((rows, width), np.float32)
    change = np.empty((rows, width), np.float32)
    qkv = np.empty((rows, (heads + 2 * kv_heads) * size), np.float32)
    seen = np.empty((rows, heads * size), np.float32)
    gate_up = np.empty((rows, 2 * inner), np.float32)
    gated = np.empty((rows, inner), np.float32)
    for row in range(rows):
        hidden[row] = weights.embedding[token_ids[row]]
    for layer in range(layers):
        rms_norm(hidden, weights.input_norms[layer], eps, normed)
        multiply(normed, weights.qkv.values[layer], weights.qkv.scales[layer], qkv)
        for row in range(rows):
            cos, signed_sin = weights.cos[positions[row]], weights.signed_sin[positions[row]]
            for head in range(heads + kv_heads):
                turn(qkv[row, head * size : (head + 1) * size], cos, signed_sin)
            for head in range(kv_heads):
                first = (heads + head) * size
                kv[layer, 0, head, length + row] = qkv[row, first : first + size]
                first += kv_heads * size
                kv[layer, 1, head, length + row] = qkv[row, first : first + size]
        attend(qkv, kv[layer], mask, heads, length + rows, seen)
        multiply(seen, weights.output.values[layer], weights.output.scales[layer], change)
        hidden += change
        rms_norm(hidden, weights.mlp_norms[layer], eps, normed)
        multiply(normed, weights.gate_up.values[layer], weights.gate_up.scales[layer], gate_up)
        for row in range(rows):
            gate, up, result = gate_up[row, :inner], gate_up[row, inner:], gated[row]
            result[:] = -gate
            exponentials(result)
            for column in range(inner):
                result[column] = gate[column] / (np.float32(1) + result[column]) * up[column]
        multiply(gated, weights.down.values[layer], weights.down.scales[layer], change)
        hidden += change
    last = hidden[rows - num_logits :]
    final = np.empty((num_logits, width), np.float32)
    rms_norm(last, weights.norm, eps, final)
    logits = np.empty((num_logits, weights.head.values.shape[0]), np.float32)
    multiply(final, weights.head.values, weights.head.scales, logits)
    return logits


@compiled
def multiply(inputs: FloatArray, values: npt.NDArray[np.int8], scales: FloatArray, results: FloatArray) -> None:
    """`results` [R, out] = `inputs` [R, in] times the transpose of `values` [out, in] with `scales` [out]."""
    rows = inputs.shape[0]
    row = 0
    while row + 4 <= rows:
        multiply_four(inputs[row : row + 4], values, results[row : row + 4])
        row += 4
    if row + 2 <= rows:
        multiply_two(inputs[row : row + 2], values, results[row : row + 2])
        row += 2
    if row < rows:
        multiply_one(inputs[row], values, results[row])
    for row in range(rows):
        for output in range(len(scales)):
            results[row, output] *= scales[output]


# Two outputs at a time, for as many rows as there are registers: each weight is turned into a float once, and each
# input is read once for two weights. Results are without scales.


@compiled
def multiply_four(inputs: FloatArray, values: npt.NDArray[np.int8], results: FloatArray) -> None:
    """Four rows of `multiply`."""
    outputs, width = values.shape
    x0, x1, x2, x3 = inputs[0], inputs[1], inputs[2], inputs[3]
    for first in range(0, outputs, 2):
        second = min(first + 1, outputs - 1)
        weights_a, weights_b = values[first], values[second]
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
        for column in range(width):
            a, b = np.float32(weights_a[column]), np.float32(weights_b[column])
            a0 += a * x0[column]
            a1 += a * x1[column]
            a2 += a * x2[column]
            a3 += a * x3[column]
            b0 += b * x0[column]
            b1 += b * x1[column]
            b2 += b * x2[column]
            b3 += b * x3[column]
        results[0, first], results[1, first], results[2, first], results[3, first] = a0, a1, a2, a3
        results[0, second], results[1, second], results[2, second], results[3, second] = b0, b1, b2, b3


@compiled
def multiply_two(inputs: FloatArray, values: npt.NDArray[np.int8], results: FloatArray) -> None:
    """Two rows of `multiply`."""
    outputs, width = values.shape
    x0, x1 = inputs[0], inputs[1]
    for first in range(0, outputs, 2):
        second = min(first + 1, outputs - 1)
        weights_a, weights_b = values[first], values[second]
        a0 = a1 = b0 = b1 = np.float32(0)
        for column in range(width):
            a, b = np.float32(weights_a[column]), np.float32(weights_b[column])
            a0 += a * x0[column]
            a1 += a * x1[column]
            b0 += b * x0[column]
            b1 += b * x1[column]
        results[0, first], results[1, first] = a0, a1
        results[0, second], results[1, second] = b0, b1


@compiled
def multiply_one(inputs: FloatArray, values: npt.NDArray[np.int8], results: FloatArray) -> None:
    """One row of `multiply`."""
    outputs, width = values.shape
    for first in range(0, outputs, 2):
        second = min(first + 1, outputs - 1)
        weights_a, weights_b = values[first], values[second]
        a = b = np.float32(0)
        for column in range(width):
            a += np.float32(weights_a[column]) * inputs[column]
            b += np.float32(weights_b[column]) * inputs[column]
        results[first], results[second] = a, b


_LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts: the first has so few bits that its product with a whole number is exact.
_LN_2_HIGH = np.float32(0.693359375)
_LN_2_LOW = np.float32(-2.12194440e-4)
_LOWEST, _HIGHEST = np.float32(-87), np.float32(88)
_EXPONENT_BIAS = 127
_FRACTION_BITS = 23


@compiled
def exponentials(values: FloatArray) -> None:
    """exp of every value [n], in place and to six digits; below -87 it stays at exp(-87).

    exp(x) = 2^n * exp(f) with a whole n and |f| <= ln 2 / 2, exp(f) by its series: a loop that compiles to vectors,
    which calls of the library's own exp do not.
    """
    exponents = np.empty(len(values), np.int32)
    for index in range(len(values)):
        x = min(max(values[index], _LOWEST), _HIGHEST)
        n = np.floor(x * _LOG2_E + np.float32(0.5))
        f = x - n * _LN_2_HIGH - n * _LN_2_LOW
        series = np.float32(1 / 720)
        series = series * f + np.float32(1 / 120)
        series = series * f + np.float32(1 / 24)
        series = series * f + np.float32(1 / 6)
        series = series * f + np.float32(0.5)
        series = series * f + np.float32(1)
        values[index] = series * f + np.float32(1)
        exponents[index] = (np.int32(n) + _EXPONENT_BIAS) << _FRACTION_BITS
    powers = exponents.view(np.float32)
    for index in range(len(values)):
        values[index] *= powers[index]


@compiled
def rms_norm(inputs: FloatArray, weight: FloatArray, eps: float, results: FloatArray) -> None:
    """`results` = `inputs` [R, h] over their root mean square, times `weight` [h]."""
    rows, width = inputs.shape
    for row in range(rows):
        total = np.float32(0)
        for column in range(width):
            total += inputs[row, column] * inputs[row, column]
        factor = np.float32(1 / np.sqrt(total / width + eps))
        for column in range(width):
            results[row, column] = inputs[row, column] * factor * weight[column]


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
            result[:] = 0
            for key in range(end):
                share = weights[key] / total
                for index in range(size):
                    result[index] += share * values[key, index]
