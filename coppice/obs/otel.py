"""Recording and export of spans: OpenTelemetry's own variables, and its SDK, the extra `traces`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from pydantic import Field

from coppice.obs.tracing import Tracer, Tracing
from coppice.settings import Settings
from coppice.version import VERSION

logger = logging.getLogger(__name__)

# How long a service that stops tries to send its last spans.
CLOSE_S = 3.0

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS = ("", "otlp")


class TraceSettings(Settings):
    """Settings of traces besides OpenTelemetry's own variables."""

    trace_rounds: float = Field(
        default=0.0, ge=0, le=1, description="Share of the traced requests whose rounds are spans, too."
    )


def open_tracer(service: str, env: Mapping[str, str]) -> Tracer | None:
    """The tracer that OpenTelemetry's variables describe; None where they ask for none, or it is not installed."""
    if not any(env.get(name) for name in _ENDPOINTS) or env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if env.get("OTEL_TRACES_EXPORTER", "") not in _EXPORTERS:
        return None
    if (protocol := next((env[name] for name in _PROTOCOLS if env.get(name)), "grpc")) != "grpc":
        logger.warning("nothing is traced: OTEL_EXPORTER_OTLP_PROTOCOL is %s, and only grpc is offered", protocol)
        return None
    try:
        return exporting_tracer(service, env)
    except ImportError as error:
        logger.warning("nothing is traced: %s (the extra 'traces' has it)", error)
        return None


def open_tracing(service: str, env: Mapping[str, str]) -> Tracing | None:
    """As `open_tracer`, for an orchestrator.

    Raises:
        ConfigError: TRACE_ROUNDS is no share.
    """
    settings = TraceSettings.from_env(env)
    tracer = open_tracer(service, env)
    return None if tracer is None else Tracing(tracer, settings.trace_rounds)


def exporting_tracer(service: str, env: Mapping[str, str]) -> Tracer:
    """A tracer that sends spans to a collector in the background, and drops them where that does not keep up.

    Sampler, limits, queue and collector are what the library reads from OTEL_*.

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
        # The library waits for the collector as long as it likes, unless the exporter gives up.
        timer = threading.Timer(CLOSE_S, exporter.shutdown)
        timer.start()
        provider.shutdown()
        timer.cancel()

    return Tracer(provider, close)
