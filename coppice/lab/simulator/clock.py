"""Time in the model, and what is to happen when."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Carries out actions in order of time, those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._numbers = itertools.count()
        self._actions: list[tuple[float, int, Action]] = []

    def later(self, delay_s: float, action: Action) -> None:
        """Carry out `action` so many seconds from now."""
        heapq.heappush(self._actions, (self.now_s + delay_s, next(self._numbers), action))

    def run_until(self, end_s: float) -> None:
        while self.step(end_s):
            pass
        self.now_s = end_s

    def step(self, end_s: float) -> bool:
        """Carry out the next action, unless it comes after `end_s`; whether there was one."""
        if not self._actions or self._actions[0][0] > end_s:
            return False
        self.now_s, _, action = heapq.heappop(self._actions)
        action()
        return True
