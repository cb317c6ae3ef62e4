"""How much of some time something was going on. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class Timeline:
    """Stretches of time that do not overlap, seconds of one clock."""

    def __init__(self, stretches: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(stretches)
        self._starts = np.array([start for start, _ in ordered])
        self._lengths = np.array([end - start for start, end in ordered])
        self._before = np.concatenate(([0.0], np.cumsum(self._lengths)))

    def within(self, start_s: float, end_s: float) -> float:
        """Seconds between two times that lie in a stretch."""
        return self._until(end_s) - self._until(start_s)

    def _until(self, at_s: float) -> float:
        count = int(np.searchsorted(self._starts, at_s, side="right"))
        if count == 0:
            return 0.0
        last = min(float(self._lengths[count - 1]), at_s - float(self._starts[count - 1]))
        return float(self._before[count - 1]) + last
