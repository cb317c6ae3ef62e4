"""Spans as OpenTelemetry has them. The one module that needs the extra `traces`."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from coppice.obs.tracing import TRACEPARENT, Attributes
from coppice.version import VERSION

# How long a service that stops tries to send its last spans.
CLOSE_S = 3.0
# A traceparent of today's version has 55 characters; later ones may have more.
MAX_TRACEPARENT_CHARACTERS = 128

_CONTEXTS = TraceContextTextMapPropagator()


class OtelSpan:
    """A span; one that is not sampled carries its context on and does nothing else."""

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


class OtelTracer:
    """Begins spans of one service."""

    def __init__(self, provider: TracerProvider, exporter: SpanExporter) -> None:
        """`exporter` is the one that the provider's spans go to."""
        self._provider = provider
        self._exporter = exporter
        self._tracer = provider.get_tracer("coppice", VERSION)

    def begin(
        self, name: str, traceparent: str = "", *, start_s: float | None = None, serves: bool = False
    ) -> OtelSpan:
        """A span that begins now or began at `start_s`; `serves`: for a caller in another process."""
        # Never the current context: spans of many requests begin in one callback.
        parent = Context()
        if 0 < len(traceparent) <= MAX_TRACEPARENT_CHARACTERS:
            parent = _CONTEXTS.extract({TRACEPARENT: traceparent}, parent)
        kind = trace.SpanKind.SERVER if serves else trace.SpanKind.INTERNAL
        start_ns = None if start_s is None else _epoch_ns(start_s)
        return OtelSpan(self._tracer, self._tracer.start_span(name, parent, kind, start_time=start_ns))

    def close(self) -> None:
        """Send what has ended, for a few seconds at most."""
        # The library waits for the collector as long as it likes, unless the exporter gives up.
        timer = threading.Timer(CLOSE_S, self._exporter.shutdown)
        timer.start()
        self._provider.shutdown()
        timer.cancel()


def exporting_tracer(service: str, env: Mapping[str, str]) -> OtelTracer:
    """A tracer that sends spans to a collector in the background, and drops them where that does not keep up.

    Sampler, limits, queue and collector are what the library reads from OTEL_*.
    """
    named = env.get("OTEL_SERVICE_NAME") or "service.name=" in env.get("OTEL_RESOURCE_ATTRIBUTES", "")
    names = {} if named else {"service.name": service}
    resource = Resource.create({**names, "service.version": VERSION})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return OtelTracer(provider, exporter)


def _epoch_ns(at_s: float) -> int:
    """A reading of the monotonic clock as nanoseconds since 1970."""
    return time.time_ns() - round((time.monotonic() - at_s) * 1e9)
