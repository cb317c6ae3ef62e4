"""A modelled orchestrator: one event loop, which takes one message after another."""

from __future__ import annotations

from simulator.clock import Action, Clock


class SimulatedOrchestrator:
    """Handles messages in the order in which they come."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_s = 0.0

    def handle(self, seconds: float, action: Action) -> None:
        """Carry out `action` when so many seconds of work are done, behind all that came before."""
        self._free_s = max(self._free_s, self._clock.now_s) + seconds
        self._clock.later(self._free_s - self._clock.now_s, action)
