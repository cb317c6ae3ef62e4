"""8-bit matrices, and their product with a few rows, for compiled code.

Drafts are hints: 8-bit weights may cost a little acceptance, never a wrong token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coppice.kernels.cpu.compiler import compiled

FloatArray = npt.NDArray[np.float32]

_SMALLEST_SCALE = 1e-8


class Weights(NamedTuple):
    """A matrix or stack of matrices [..., out, in] in 8 bits, with one scale per output [..., out].

    In the arrangement of `int8_inputs` values are unsigned and [..., blocks, in / 4, 16, 4].
    """

    values: npt.NDArray[np.int8] | npt.NDArray[np.uint8]
    scales: FloatArray


def quantise(weight: FloatArray) -> Weights:
    """Symmetric 8-bit quantisation with one scale per output."""
    scales = np.maximum(np.abs(weight).max(-1) / 127, _SMALLEST_SCALE).astype(np.float32)
    return Weights(np.rint(weight / scales[..., None]).astype(np.int8), scales)


@compiled
def multiply_floats(inputs: FloatArray, values: npt.NDArray[np.int8], scales: FloatArray, results: FloatArray) -> None:
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


# Two outputs at a time, for as many rows as fit in registers: each weight is converted once, and each input read once
# per two weights. Results are unscaled.


@compiled
def multiply_four(inputs: FloatArray, values: npt.NDArray[np.int8], results: FloatArray) -> None:
    """Four rows of `multiply_floats`."""
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
    """Two rows of `multiply_floats`."""
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
    """One row of `multiply_floats`."""
    outputs, width = values.shape
    for first in range(0, outputs, 2):
        second = min(first + 1, outputs - 1)
        weights_a, weights_b = values[first], values[second]
        a = b = np.float32(0)
        for column in range(width):
            a += np.float32(weights_a[column]) * inputs[column]
            b += np.float32(weights_b[column]) * inputs[column]
        results[first], results[second] = a, b
