"""Spans of one peer's sequences, from the messages of its stream. Attributes: docs/traces.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from coppice.net.rpc import status_code_name
from coppice.obs.tracing import Attributes, Span, Tracer

_FAULTS = frozenset({"internal", "unavailable"})


class SequenceCounts(Protocol):
    """Accumulated counts of one sequence."""

    def heard(self, message: Any) -> None:
        """The peer sent a message other than open and close."""

    def told(self, message: Any) -> None:
        """The peer was sent a message other than an error."""

    def attributes(self) -> Attributes:
        """Counts so far, as span attributes."""


class SequenceSpans:
    """One span per sequence of a stream, with its counts."""

    def __init__(self, tracer: Tracer, name: str, count: Callable[[Any], SequenceCounts], left: str = "") -> None:
        """`count` gets the message that opens a sequence; `left` is the error of sequences that the peer abandons."""
        self._tracer = tracer
        self._name = name
        self._count = count
        self._left = left
        self._open: dict[int, tuple[Span, SequenceCounts]] = {}

    def heard(self, message: Any) -> None:
        """The peer sent a message."""
        kind = message.WhichOneof("event")
        if kind == "close":
            self._end(message.sequence_id, self._left)
        elif (known := self._open.get(message.sequence_id)) is not None:
            known[1].heard(message)
        elif kind == "open":
            span = self._tracer.begin(self._name, message.open.traceparent, serves=True)
            self._open[message.sequence_id] = span, self._count(message.open)

    def told(self, message: Any) -> None:
        """The peer was sent a message."""
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
