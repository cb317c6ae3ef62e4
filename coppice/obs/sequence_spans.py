"""One peer's sequences as spans, from the messages that pass the door. Attributes are named as in docs/traces.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from coppice.net.rpc import status_code_name
from coppice.obs.tracing import Attributes, Span, Tracer

_FAULTS = frozenset({"internal", "unavailable"})


class SequenceCounts(Protocol):
    """What one sequence adds up to."""

    def heard(self, message: Any) -> None:
        """Its peer has sent a message, not the one that opens or closes it."""

    def told(self, message: Any) -> None:
        """Its peer is sent a message, not an error."""

    def attributes(self) -> Attributes:
        """The counts so far."""


class SequenceSpans:
    """A span for each sequence of one stream, with what it adds up to."""

    def __init__(self, tracer: Tracer, name: str, count: Callable[[Any], SequenceCounts], left: str = "") -> None:
        """`count` is given the message that opens a sequence; `left` is the error of one that the peer has left."""
        self._tracer = tracer
        self._name = name
        self._count = count
        self._left = left
        self._open: dict[int, tuple[Span, SequenceCounts]] = {}

    def heard(self, message: Any) -> None:
        """The peer opens or closes a sequence, or says something of it."""
        kind = message.WhichOneof("event")
        if kind == "close":
            self._end(message.sequence_id, self._left)
        elif (known := self._open.get(message.sequence_id)) is not None:
            known[1].heard(message)
        elif kind == "open":
            span = self._tracer.begin(self._name, message.open.traceparent, serves=True)
            self._open[message.sequence_id] = span, self._count(message.open)

    def told(self, message: Any) -> None:
        """The peer hears of a sequence, or of its end."""
        if (known := self._open.get(message.sequence_id)) is None:
            return
        kind = message.WhichOneof("event")
        if kind == "error":
            self._end(message.sequence_id, status_code_name(message.error.code).lower())
            return
        known[1].told(message)
        if kind == "finished":
            self._end(message.sequence_id)

    def over(self) -> None:
        """The stream has ended, and its sequences with it."""
        for sequence_id in list(self._open):
            self._end(sequence_id, self._left)

    def _end(self, sequence_id: int, error: str = "") -> None:
        span, counts = self._open.pop(sequence_id, (None, None))
        if span is not None and counts is not None:
            end = {"error.type": error} if error else {}
            span.end({**counts.attributes(), **end}, failed=error in _FAULTS)
