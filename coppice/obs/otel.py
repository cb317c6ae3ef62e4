"""Recording and export of spans with OpenTelemetry's SDK (extra `traces`), configured by its own variables."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from pydantic import Field

from coppice.obs.tracing import Tracer, Tracing
from coppice.settings import Settings
from coppice.version import VERSION

logger = logging.getLogger(__name__)

# Seconds that a stopping service tries to send its last spans.
CLOSE_S = 3.0

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS = ("", "otlp")


class TraceSettings(Settings):
    """Settings of traces beyond OpenTelemetry's own variables."""

    trace_rounds: float = Field(
        default=0.0, ge=0, le=1, description="Share of the traced requests whose rounds are spans, too."
    )


def open_tracer(service: str, env: Mapping[str, str]) -> Tracer | None:
    """Tracer configured by OpenTelemetry's variables; None if they ask for none or it is not installed."""
    if not any(env.get(name) for name in _ENDPOINTS) or env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if env.get("OTEL_TRACES_EXPORTER", "") not in _EXPORTERS:
        return None
    if (protocol := next((env[name] for name in _PROTOCOLS if env.get(name)), "grpc")) != "grpc":
        logger.warning("tracing is off: OTEL_EXPORTER_OTLP_PROTOCOL is %s, only grpc is supported", protocol)
        return None
    try:
        return exporting_tracer(service, env)
    except ImportError as error:
        logger.warning("tracing is off: %s (install the extra 'traces')", error)
        return None


def open_tracing(service: str, env: Mapping[str, str]) -> Tracing | None:
    """Like `open_tracer`, for an orchestrator.

    Raises:
        ConfigError: TRACE_ROUNDS is not a fraction.
    """
    settings = TraceSettings.from_env(env)
    tracer = open_tracer(service, env)
    return None if tracer is None else Tracing(tracer, settings.trace_rounds)


def exporting_tracer(service: str, env: Mapping[str, str]) -> Tracer:
    """Tracer that sends spans to a collector in the background, and drops them if it cannot keep up.

    Sampler, limits, queue and collector are configured by OTEL_*.

    Raises:
        ImportError: the extra `traces` is not installed.
    """
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = env.get("OTEL_SERVICE_NAME") or "service.name=" in env.get("OTEL_RESOURCE_ATTRIBUTES", "")
    names = {} if named else {"service.name": service}
    resource = Resource.create({**names, "service.version": VERSION})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))

    def close() -> None:
        # Shutting down the exporter bounds the library's wait for the collector.
        timer = threading.Timer(CLOSE_S, exporter.shutdown)
        timer.start()
        provider.shutdown()
        timer.cancel()

    return Tracer(provider, close)
