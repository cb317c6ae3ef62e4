"""How often a quantity fell into each of some ranges, as Prometheus counts it."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a histogram has seen: `counts` of values by range, one more than there are `bounds`, and the values' `sum`.

    Range i ends at bound i, itself included; the last one has no end.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """Values seen."""
        return sum(self.counts)


class Histogram:
    """Counts values by range, on any thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the upper ends of the ranges, ascending, itself included each; the last range has none."""
        self._bounds = tuple(bounds)
        if not self._bounds or any(low >= high for low, high in zip(self._bounds, self._bounds[1:], strict=False)):
            raise ValueError(f"the bounds of a histogram have to ascend, got {self._bounds}")
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        # A mean is the sum over the counts: neither may be read without the other's last value.
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Count a value."""
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def read(self) -> Distribution:
        """What was seen so far."""
        with self._lock:
            return Distribution(self._bounds, tuple(self._counts), self._sum)
