"""The noise of a request's coming positions, side by side, so that a whole draft reads it where it lies."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.core.noise import gumbel

FloatArray = npt.NDArray[np.float32]


class NoiseRows:
    """Noise times temperature, a row [vocab] for each of some consecutive positions.

    Room is for twice as many rows as are asked for at once: the rows move to the front only now and then.
    """

    def __init__(self, seed: int, vocab_size: int, temperature: float) -> None:
        self._seed = seed
        self._temperature = temperature
        self._rows: FloatArray = np.empty((0, vocab_size), np.float32)
        # The position of the first row in use, and the rows in use: from `_start` to before `_end`.
        self._position = 0
        self._start = self._end = 0

    def at(self, position: int, count: int = 1) -> FloatArray:
        """Rows [count, vocab] of `count` positions. They hold until the next call."""
        if not self._position <= position <= self._position + self._end - self._start:
            self._position, self._start, self._end = position, 0, 0
        first = self._start + position - self._position
        if first + count > len(self._rows):
            first = self._make_room(first, count)
        if (missing := first + count - self._end) > 0:
            noise = gumbel(self._seed, position + count - missing, missing, self._rows.shape[1])
            np.multiply(noise, self._temperature, out=self._rows[self._end : first + count], casting="same_kind")
            self._end = first + count
        return self._rows[first : first + count]

    def _make_room(self, first: int, count: int) -> int:
        """Move the rows from `first` on to the front and forget those before; returns where they are then: 0."""
        kept = self._rows[first : self._end]
        rows = self._rows
        if 2 * count > len(rows):
            rows = np.empty((2 * count, rows.shape[1]), np.float32)
        rows[: len(kept)] = kept.copy()
        self._position += first - self._start
        self._rows, self._start, self._end = rows, 0, len(kept)
        return 0
