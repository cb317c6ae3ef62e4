"""Inner loops of the compiled attention, with the order of every sum written down. Compiled without leave to change it.

Each loop runs over independent numbers side by side (keys, values' columns, lanes), which become vectors; what is
added up is added in the order of the text, so that the same inputs give the same bits wherever they stand.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.compiler import compiled_exactly
from verifier_svc.kv_cache import BLOCK_SIZE

FloatArray = npt.NDArray[np.float32]

# Partial sums of a long sum: position p goes to lane p mod LANES.
LANES = 16

_LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts: the first has so few bits that its product with a whole number is exact.
_LN_2_HIGH = np.float32(0.693359375)
_LN_2_LOW = np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87)
_EXPONENT_BIAS = 127
_FRACTION_BITS = 23
_C2, _C3, _C4, _C5, _C6 = (np.float32(1 / number) for number in (2, 6, 24, 120, 720))


@compiled_exactly
def score_block(query: FloatArray, page: FloatArray, scores: FloatArray) -> None:
    """`scores` [B] = `query` [D] times `page` [D, B], each key's products added in order."""
    size = len(query)
    scores[:] = 0
    d = 0
    while d + 8 <= size:
        q0, q1, q2, q3 = query[d], query[d + 1], query[d + 2], query[d + 3]
        q4, q5, q6, q7 = query[d + 4], query[d + 5], query[d + 6], query[d + 7]
        k0, k1, k2, k3 = page[d], page[d + 1], page[d + 2], page[d + 3]
        k4, k5, k6, k7 = page[d + 4], page[d + 5], page[d + 6], page[d + 7]
        for key in range(BLOCK_SIZE):
            near = scores[key] + q0 * k0[key] + q1 * k1[key] + q2 * k2[key] + q3 * k3[key]
            scores[key] = near + q4 * k4[key] + q5 * k5[key] + q6 * k6[key] + q7 * k7[key]
        d += 8
    while d < size:
        factor, keys = query[d], page[d]
        for key in range(BLOCK_SIZE):
            scores[key] += factor * keys[key]
        d += 1


@compiled_exactly
def score_block_of_four(queries: FloatArray, page: FloatArray, scores: FloatArray, start: int) -> None:
    """`score_block` for four rows of `queries` [4, D], D a multiple of 4: keys are read once.

    Their scores are `scores` [4, keys] from `start` on.
    """
    end = start + BLOCK_SIZE
    q0, q1, q2, q3 = queries[0], queries[1], queries[2], queries[3]
    s0, s1, s2, s3 = scores[0, start:end], scores[1, start:end], scores[2, start:end], scores[3, start:end]
    s0[:], s1[:], s2[:], s3[:] = 0, 0, 0, 0
    for d in range(0, queries.shape[1], 4):
        a0, a1, a2, a3 = q0[d], q0[d + 1], q0[d + 2], q0[d + 3]
        b0, b1, b2, b3 = q1[d], q1[d + 1], q1[d + 2], q1[d + 3]
        c0, c1, c2, c3 = q2[d], q2[d + 1], q2[d + 2], q2[d + 3]
        d0, d1, d2, d3 = q3[d], q3[d + 1], q3[d + 2], q3[d + 3]
        k0, k1, k2, k3 = page[d], page[d + 1], page[d + 2], page[d + 3]
        for key in range(BLOCK_SIZE):
            x0, x1, x2, x3 = k0[key], k1[key], k2[key], k3[key]
            s0[key] = s0[key] + a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
            s1[key] = s1[key] + b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
            s2[key] = s2[key] + c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
            s3[key] = s3[key] + d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3


@compiled_exactly
def add_products(weights: FloatArray, values: FloatArray, sums: FloatArray) -> None:
    """Add `weights` [n] times the first n of `values` [keys, D] to `sums` [D], in order."""
    count, size = len(weights), len(sums)
    key = 0
    while key + 4 <= count:
        w0, w1, w2, w3 = weights[key], weights[key + 1], weights[key + 2], weights[key + 3]
        v0, v1, v2, v3 = values[key], values[key + 1], values[key + 2], values[key + 3]
        for d in range(size):
            sums[d] = sums[d] + w0 * v0[d] + w1 * v1[d] + w2 * v2[d] + w3 * v3[d]
        key += 4
    while key < count:
        weight, value = weights[key], values[key]
        for d in range(size):
            sums[d] += weight * value[d]
        key += 1


@compiled_exactly
def add_products_of_four(weights: FloatArray, values: FloatArray, sums: FloatArray) -> None:
    """`add_products` for four rows of `weights` [4, n] and `sums` [4, D], n a multiple of 4: values are read once."""
    w0, w1, w2, w3 = weights[0], weights[1], weights[2], weights[3]
    s0, s1, s2, s3 = sums[0], sums[1], sums[2], sums[3]
    for key in range(0, weights.shape[1], 4):
        a0, a1, a2, a3 = w0[key], w0[key + 1], w0[key + 2], w0[key + 3]
        b0, b1, b2, b3 = w1[key], w1[key + 1], w1[key + 2], w1[key + 3]
        c0, c1, c2, c3 = w2[key], w2[key + 1], w2[key + 2], w2[key + 3]
        d0, d1, d2, d3 = w3[key], w3[key + 1], w3[key + 2], w3[key + 3]
        v0, v1, v2, v3 = values[key], values[key + 1], values[key + 2], values[key + 3]
        for column in range(values.shape[1]):
            x0, x1, x2, x3 = v0[column], v1[column], v2[column], v3[column]
            s0[column] = s0[column] + a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
            s1[column] = s1[column] + b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
            s2[column] = s2[column] + c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
            s3[column] = s3[column] + d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3


@compiled_exactly
def lane_sum(numbers: FloatArray) -> np.float32:
    """The sum of `numbers` [a multiple of LANES]: one partial sum per lane, then these pairwise."""
    lanes = np.zeros(LANES, np.float32)
    for start in range(0, len(numbers), LANES):
        some = numbers[start : start + LANES]
        for lane in range(LANES):
            lanes[lane] += some[lane]
    width = LANES // 2
    while width > 0:
        for lane in range(width):
            lanes[lane] += lanes[lane + width]
        width //= 2
    return np.float32(lanes[0])


@compiled_exactly
def lane_max(numbers: FloatArray) -> np.float32:
    """The largest of `numbers` [a multiple of LANES]."""
    lanes = np.full(LANES, np.float32(-np.inf))
    for start in range(0, len(numbers), LANES):
        some = numbers[start : start + LANES]
        for lane in range(LANES):
            lanes[lane] = max(lanes[lane], some[lane])
    return np.float32(lanes.max())


@compiled_exactly
def exponentials(numbers: FloatArray, highest: np.float32) -> None:
    """exp(number - highest) of every number [n], none above the highest, in place and to six digits.

    Below -87 it stays at exp(-87). exp(x) = 2^n * exp(f) with a whole n and |f| <= ln 2 / 2, exp(f) by its series.
    """
    exponents = np.empty(len(numbers), np.int32)
    for index in range(len(numbers)):
        x = max(numbers[index] - highest, _LOWEST)
        n = np.floor(x * _LOG2_E + np.float32(0.5))
        f = x - n * _LN_2_HIGH - n * _LN_2_LOW
        series = ((((_C6 * f + _C5) * f + _C4) * f + _C3) * f + _C2) * f + np.float32(1)
        numbers[index] = series * f + np.float32(1)
        exponents[index] = (np.int32(n) + _EXPONENT_BIAS) << _FRACTION_BITS
    powers = exponents.view(np.float32)
    for index in range(len(numbers)):
        numbers[index] *= powers[index]
