"""A modelled orchestrator: one event loop, which takes one message after another."""

from __future__ import annotations

from collections import deque

from coppice.lab.simulator.clock import Action, Clock


class SimulatedOrchestrator:
    """Handles messages in the order in which they come, each with whatever follows from it.

    All that it does takes `factor` times as long as on cores of its own.
    """

    def __init__(self, clock: Clock, factor: float = 1.0) -> None:
        self._clock = clock
        self._factor = factor
        self._messages: deque[tuple[float, Action]] = deque()
        self._is_busy = False
        # What the message at hand takes beyond what was known before.
        self._more_s = 0.0

    def handle(self, seconds: float, action: Action) -> None:
        """Carry out `action` when so many seconds of work are done, behind all that came before."""
        self._messages.append((self._factor * seconds, action))
        self._next()

    def spend(self, seconds: float) -> float:
        """Work for so much longer on the message at hand, if any; returns when that is done, in seconds from now."""
        if not self._is_busy:
            self.handle(seconds, lambda: None)
            return self._factor * seconds
        self._more_s += self._factor * seconds
        return self._more_s

    def _next(self) -> None:
        if self._messages and not self._is_busy:
            self._is_busy = True
            seconds, action = self._messages.popleft()
            self._clock.later(seconds, lambda: self._handled(action))

    def _handled(self, action: Action) -> None:
        action()
        self._clock.later(self._more_s, self._free)

    def _free(self) -> None:
        self._is_busy, self._more_s = False, 0.0
        self._next()
