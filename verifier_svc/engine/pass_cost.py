"""The fixed cost of a pass in rows, learned from the passes that ran."""

from __future__ import annotations

import math

# What is left of a pass's weight with each further one, and the weight of all from which on something is known.
_FADE = 1 - 1 / 128
_LEAST_WEIGHT = 16.0
# Numbers of rows tell nothing of what one costs unless their spread is this share of their mean.
_LEAST_SPREAD = 0.2
# A pass that takes this many times what it should was held up by something else.
_OUTLIER = 3.0


class PassCost:
    """Least squares of seconds = own + row x rows, older passes fading."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._rows = self._seconds = 0.0
        self._rows_squared = self._rows_seconds = 0.0
        # Seconds of a pass by itself and of a row, once known.
        self._line: tuple[float, float] | None = None

    @property
    def own_rows(self) -> float:
        """How many rows take as long as a pass without any; infinite where rows are free.

        0 until it is known. Then trees are small, and prompts that come and go make passes of many sizes.
        """
        if self._line is None:
            return 0.0
        own_s, row_s = self._line
        return max(0.0, own_s) / row_s if row_s > 0 else math.inf

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
