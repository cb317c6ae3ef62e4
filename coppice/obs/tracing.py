"""Spans of requests across the services, made with OpenTelemetry's API. What clients send or get as text is in none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from coppice.version import VERSION

# The key of a call's metadata that has the caller's span.
TRACEPARENT = "traceparent"
# A traceparent of today's version has 55 characters; later ones may have more.
MAX_TRACEPARENT_CHARACTERS = 128

Attributes: TypeAlias = Mapping[str, str | bool | int | float | Sequence[str]]

_CONTEXTS = TraceContextTextMapPropagator()


class Span:
    """A span of OpenTelemetry, with times that are readings of `time.monotonic`.

    One that is not sampled carries its context on and does nothing else.
    """

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def traceparent(self) -> str:
        """What spans that this one causes begin with, here and in other services."""
        carrier: dict[str, str] = {}
        _CONTEXTS.inject(carrier, trace.set_span_in_context(self._span, Context()))
        return carrier.get(TRACEPARENT, "")

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Something happens now."""
        self._span.add_event(name, attributes)

    def phase(self, name: str, start_s: float, end_s: float, attributes: Attributes | None = None) -> None:
        """A part of it that is over: a span of its own."""
        if self._span.is_recording():
            parent = trace.set_span_in_context(self._span, Context())
            span = self._tracer.start_span(name, parent, attributes=attributes, start_time=_epoch_ns(start_s))
            span.end(_epoch_ns(end_s))

    def end(self, attributes: Attributes, *, failed: bool = False) -> None:
        """It is over; once."""
        if self._span.is_recording():
            self._span.set_attributes(attributes)
            if failed:
                self._span.set_status(trace.StatusCode.ERROR)
        self._span.end()


class Tracer:
    """Begins spans of one service. Any thread may use it."""

    def __init__(self, provider: trace.TracerProvider, close: Callable[[], None]) -> None:
        """`close` sends what has ended, for a few seconds at most, and gives up what cannot be sent."""
        self._tracer = provider.get_tracer("coppice", VERSION)
        self.close = close

    def begin(self, name: str, traceparent: str = "", *, start_s: float | None = None, serves: bool = False) -> Span:
        """A span that begins now or began at `start_s`; `serves`: for a caller in another process.

        A `traceparent` that cannot be read is ignored: the span is the first of a new trace.
        """
        # Never the current context: spans of many requests begin in one callback.
        parent = Context()
        if 0 < len(traceparent) <= MAX_TRACEPARENT_CHARACTERS:
            parent = _CONTEXTS.extract({TRACEPARENT: traceparent}, parent)
        kind = trace.SpanKind.SERVER if serves else trace.SpanKind.INTERNAL
        start_ns = None if start_s is None else _epoch_ns(start_s)
        return Span(self._tracer, self._tracer.start_span(name, parent, kind, start_time=start_ns))


@dataclass(frozen=True)
class Tracing:
    """How an orchestrator traces its requests."""

    tracer: Tracer
    # Share of the traced requests whose rounds are spans, too.
    rounds_share: float = 0.0


def _epoch_ns(at_s: float) -> int:
    """A reading of the monotonic clock as nanoseconds since 1970."""
    return time.time_ns() - round((time.monotonic() - at_s) * 1e9)
