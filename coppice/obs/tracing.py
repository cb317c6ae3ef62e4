"""Spans of requests across services, with OpenTelemetry's API. They contain no texts of clients."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from coppice.version import VERSION

# Metadata key of the caller's span.
TRACEPARENT = "traceparent"
# The current version of traceparent has 55 characters; later ones may have more.
MAX_TRACEPARENT_CHARACTERS = 128

Attributes: TypeAlias = Mapping[str, str | bool | int | float | Sequence[str]]

_CONTEXTS = TraceContextTextMapPropagator()


class Span:
    """OpenTelemetry span with times of `time.monotonic`.

    Without sampling it only propagates its context.
    """

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def traceparent(self) -> str:
        """Trace context for child spans, here and in other services."""
        carrier: dict[str, str] = {}
        _CONTEXTS.inject(carrier, trace.set_span_in_context(self._span, Context()))
        return carrier.get(TRACEPARENT, "")

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Add an event now."""
        self._span.add_event(name, attributes)

    def phase(self, name: str, start_s: float, end_s: float, attributes: Attributes | None = None) -> None:
        """Add a finished child span."""
        if self._span.is_recording():
            parent = trace.set_span_in_context(self._span, Context())
            span = self._tracer.start_span(name, parent, attributes=attributes, start_time=_epoch_ns(start_s))
            span.end(_epoch_ns(end_s))

    def end(self, attributes: Attributes, *, failed: bool = False) -> None:
        """End the span."""
        if self._span.is_recording():
            self._span.set_attributes(attributes)
            if failed:
                self._span.set_status(trace.StatusCode.ERROR)
        self._span.end()


class Tracer:
    """Starts spans of one service. Safe on any thread."""

    def __init__(self, provider: trace.TracerProvider, close: Callable[[], None]) -> None:
        """`close` flushes ended spans within a few seconds, and drops the rest."""
        self._tracer = provider.get_tracer("coppice", VERSION)
        self.close = close

    def begin(self, name: str, traceparent: str = "", *, start_s: float | None = None, serves: bool = False) -> Span:
        """Span that starts now or at `start_s`; `serves`: for a caller in another process.

        An invalid `traceparent` is ignored: the span starts a new trace.
        """
        # Not the current context: one callback starts spans of many requests.
        parent = Context()
        if 0 < len(traceparent) <= MAX_TRACEPARENT_CHARACTERS:
            parent = _CONTEXTS.extract({TRACEPARENT: traceparent}, parent)
        kind = trace.SpanKind.SERVER if serves else trace.SpanKind.INTERNAL
        start_ns = None if start_s is None else _epoch_ns(start_s)
        return Span(self._tracer, self._tracer.start_span(name, parent, kind, start_time=start_ns))


@dataclass(frozen=True)
class Tracing:
    """Tracing of an orchestrator's requests."""

    tracer: Tracer
    # Fraction of traced requests with spans of rounds.
    rounds_share: float = 0.0


def _epoch_ns(at_s: float) -> int:
    """Monotonic time as nanoseconds since 1970."""
    return time.time_ns() - round((time.monotonic() - at_s) * 1e9)
