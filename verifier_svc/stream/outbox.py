"""Delivery of the engine's events to streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from verifier_svc.stream.events import Event

# Takes a batch of events, on the engine's thread.
Sink: TypeAlias = Callable[[Sequence[Event]], None]


class Outbox:
    """Collects events per stream until delivery, in order. For the engine's thread only."""

    def __init__(self) -> None:
        self._sinks: dict[int, Sink] = {}
        self._events: dict[int, list[Event]] = {}

    def attach(self, stream: int, sink: Sink) -> None:
        """Deliver a stream's events to `sink` from now on."""
        self._sinks[stream] = sink

    def detach(self, stream: int) -> None:
        """Remove a stream and drop its undelivered events."""
        self._sinks.pop(stream, None)
        self._events.pop(stream, None)

    def put(self, stream: int, event: Event) -> None:
        """Queue an event for a stream."""
        self._events.setdefault(stream, []).append(event)

    def put_for_all(self, event: Event) -> None:
        """Queue an event for every stream."""
        for stream in self._sinks:
            self.put(stream, event)

    def deliver(self) -> None:
        """Deliver all queued events."""
        for stream, events in self._events.items():
            sink = self._sinks.get(stream)
            if sink is not None:
                sink(events)
        self._events.clear()
