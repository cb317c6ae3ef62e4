"""Compiled causal convolutions over token trees: a row's output is a weighted sum of its own and its ancestors' inputs.

Products are added one after the other, the oldest first, each rounded (`compiled_exactly`), so a row's bits depend on
its path alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.kernels.cpu.compiler import compiled_exactly
from verifier_svc.engine.kv_cache import IntArray
from verifier_svc.kernels.cpu.shared_work import CounterArray, done, take, wait_for

FloatArray = npt.NDArray[np.float32]

_PIECE_ROWS = 64


@compiled_exactly
def convolve(
    inputs: FloatArray,
    before: FloatArray,
    windows: IntArray,
    weights: FloatArray,
    biases: FloatArray,
    output: FloatArray,
    counters: CounterArray,
) -> None:
    """Outputs of a pass's rows: one phase; a piece is some rows.

    Args:
        inputs: of rows [N, channels], padding included.
        before: last inputs before every segment [places, channels].
        windows: places of a row's input and its nearest ancestors', oldest first [rows or more, width]; those from the
            number of rows on are in `before`.
        weights: [width, channels], oldest first.
        biases: [channels], or [0] for none.
        output: [rows, channels], written.
        counters: see `shared_work.py`.
    """
    num_rows, channels = output.shape
    num_pieces = -(-num_rows // _PIECE_ROWS)
    piece = take(counters, 0)
    while piece < num_pieces:
        for row in range(piece * _PIECE_ROWS, min(num_rows, (piece + 1) * _PIECE_ROWS)):
            target = output[row]
            for place in range(len(weights)):
                index, factors = windows[row, place], weights[place]
                numbers = inputs[index] if index < num_rows else before[index - num_rows]
                if place == 0:
                    for channel in range(channels):
                        target[channel] = numbers[channel] * factors[channel]
                else:
                    for channel in range(channels):
                        target[channel] += numbers[channel] * factors[channel]
            if len(biases) > 0:
                for channel in range(channels):
                    target[channel] += biases[channel]
        done(counters, 0)
        piece = take(counters, 0)
    wait_for(counters, 0, num_pieces)
