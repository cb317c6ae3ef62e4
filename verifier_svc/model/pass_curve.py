"""Relative duration of small passes by rows. Pure; `loading.measure_curve` measures it.

Kernels compute rows in blocks (six on one of our machines), so that some additional rows are nearly free and others
cost a whole block. It never affects tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class PassCurve:
    """`times[n]` of a pass with n + 1 rows, relative to the smallest pass; never decreasing.

    Raises:
        ValueError: fewer than two times, or decreasing ones.
    """

    times: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.times) < 2 or self.times[0] <= 0 or any(a > b for a, b in itertools.pairwise(self.times)):
            raise ValueError(f"times of passes must be positive and grow with their rows, got {self.times}")

    @classmethod
    def line(cls, per_row: float) -> Self:
        """Curve on which every further row takes `per_row` of the smallest pass."""
        return cls((1.0, 1.0 + per_row))

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], seconds: Sequence[float]) -> Self:
        """Curve of passes padded to one of `sizes`, in ascending order."""
        longest = list(itertools.accumulate(seconds, max))
        padded = [next(at for at, size in enumerate(sizes) if size >= rows) for rows in range(1, sizes[-1] + 1)]
        return cls(tuple([longest[at] / longest[0] for at in padded]))

    def at(self, rows: int) -> float:
        """Relative time of a pass; extrapolated by `per_row`."""
        times = self.times
        if rows <= len(times):
            return times[max(rows, 1) - 1]
        return times[-1] + (rows - len(times)) * self.per_row

    @property
    def per_row(self) -> float:
        """Mean relative cost of a further row."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)
