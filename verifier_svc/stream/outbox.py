"""Events on their way from the engine to the streams that they are for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from verifier_svc.stream.events import Event

# Takes a batch of events, on the engine's thread.
Sink: TypeAlias = Callable[[Sequence[Event]], None]


class Outbox:
    """Keeps each stream's events until they are delivered, in order. Only the engine's thread touches it."""

    def __init__(self) -> None:
        self._sinks: dict[int, Sink] = {}
        self._events: dict[int, list[Event]] = {}

    def attach(self, stream: int, sink: Sink) -> None:
        """Events of a stream go to `sink` from now on."""
        self._sinks[stream] = sink

    def detach(self, stream: int) -> None:
        """The stream is gone, and so is what it was not told yet."""
        self._sinks.pop(stream, None)
        self._events.pop(stream, None)

    def put(self, stream: int, event: Event) -> None:
        """Tell a stream of an event with the next delivery."""
        self._events.setdefault(stream, []).append(event)

    def put_for_all(self, event: Event) -> None:
        """Tell every stream of an event with the next delivery."""
        for stream in self._sinks:
            self.put(stream, event)

    def deliver(self) -> None:
        """Hand out what there is."""
        for stream, events in self._events.items():
            sink = self._sinks.get(stream)
            if sink is not None:
                sink(events)
        self._events.clear()
