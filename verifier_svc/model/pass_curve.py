"""The relative time of small passes by their rows. Pure; `loading.measure_curve` measures it.

Kernels compute rows in blocks of their own (six on one of our machines), so that some of the next rows are nearly free
and others cost a whole block. Nothing of this decides on a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class PassCurve:
    """`times[n]` of a pass with n + 1 rows, that of the smallest one being 1; more rows never take less time.

    Raises:
        ValueError: there are fewer than two times, or they are not in order.
    """

    times: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.times) < 2 or self.times[0] <= 0 or any(a > b for a, b in itertools.pairwise(self.times)):
            raise ValueError(f"times of passes must be positive and grow with their rows, got {self.times}")

    @classmethod
    def line(cls, per_row: float) -> Self:
        """A curve on which every row takes this part of the smallest pass."""
        return cls((1.0, 1.0 + per_row))

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], seconds: Sequence[float]) -> Self:
        """The curve of passes that have one of some sizes, in order, each filled up to the next."""
        longest = list(itertools.accumulate(seconds, max))
        padded = [next(at for at, size in enumerate(sizes) if size >= rows) for rows in range(1, sizes[-1] + 1)]
        return cls(tuple([longest[at] / longest[0] for at in padded]))

    def at(self, rows: int) -> float:
        """The time of a pass with so many rows; beyond those measured, each takes as long as they do on average."""
        times = self.times
        if rows <= len(times):
            return times[max(rows, 1) - 1]
        return times[-1] + (rows - len(times)) * self.per_row

    @property
    def per_row(self) -> float:
        """What a row takes on average, where blocks do not matter."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)
