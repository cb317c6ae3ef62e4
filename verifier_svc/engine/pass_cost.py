"""Fixed cost of a pass in rows, learned from passes."""

from __future__ import annotations

import math

# Decay per pass of earlier passes' weight, and least total weight before results are used.
_FADE = 1 - 1 / 128
_LEAST_WEIGHT = 16.0
# Least spread of row counts, as a share of their mean, before the cost of a row can be estimated.
_LEAST_SPREAD = 0.2
# Upper bound of a pass's time, in expected ones: longer passes were delayed by something else.
_OUTLIER = 3.0


class PassCost:
    """Least squares of seconds = own + row x rows, with decaying weights."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._rows = self._seconds = 0.0
        self._rows_squared = self._rows_seconds = 0.0
        # Seconds of a pass and of a row, once known.
        self._line: tuple[float, float] | None = None

    @property
    def own_rows(self) -> float:
        """Number of rows whose cost equals a pass's fixed cost; infinite if rows are free.

        0 until known. Then trees are small, and prompts vary the sizes of passes.
        """
        if self._line is None:
            return 0.0
        own_s, row_s = self._line
        return max(0.0, own_s) / row_s if row_s > 0 else math.inf

    def seconds(self, num_rows: int) -> tuple[float, float]:
        """Seconds of a pass of so many rows, and of a further row; (0, 0) until known."""
        if self._line is None:
            return 0.0, 0.0
        own_s, row_s = self._line
        row_s = max(0.0, row_s)
        return max(0.0, own_s) + row_s * num_rows, row_s

    def add(self, num_rows: int, seconds: float) -> None:
        """Learn from a pass."""
        if self._line is not None:
            own_s, row_s = self._line
            expected_s = own_s + row_s * num_rows
            if expected_s > 0:
                seconds = min(seconds, _OUTLIER * expected_s)
        self._weight = _FADE * self._weight + 1
        self._rows = _FADE * self._rows + num_rows
        self._seconds = _FADE * self._seconds + seconds
        self._rows_squared = _FADE * self._rows_squared + num_rows * num_rows
        self._rows_seconds = _FADE * self._rows_seconds + num_rows * seconds
        if self._weight < _LEAST_WEIGHT:
            return
        mean = self._rows / self._weight
        variance = self._rows_squared / self._weight - mean * mean
        if variance < (_LEAST_SPREAD * mean) ** 2:
            return
        row_s = (self._rows_seconds / self._weight - mean * self._seconds / self._weight) / variance
        self._line = self._seconds / self._weight - row_s * mean, row_s
