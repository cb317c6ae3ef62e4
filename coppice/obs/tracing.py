"""Traces of requests across the services: what a service needs of them, and whether there are any.

Nothing of OpenTelemetry is imported unless its own variables name a collector. What clients send or get as text is in
no span.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from pydantic import Field

from coppice.settings import Settings

logger = logging.getLogger(__name__)

# The key of a call's metadata that has the caller's span.
TRACEPARENT = "traceparent"

Attributes: TypeAlias = Mapping[str, str | bool | int | float | Sequence[str]]

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS = ("", "otlp")


class Span(Protocol):
    """Something that takes time. Times are readings of `time.monotonic`."""

    @property
    def traceparent(self) -> str:
        """What spans that this one causes begin with, here and in other services."""

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Something happens now."""

    def phase(self, name: str, start_s: float, end_s: float, attributes: Attributes | None = None) -> None:
        """A part of it that is over: a span of its own."""

    def end(self, attributes: Attributes, *, failed: bool = False) -> None:
        """It is over; once."""


class Tracer(Protocol):
    """Begins spans. Any thread may use it."""

    def begin(self, name: str, traceparent: str = "", *, start_s: float | None = None, serves: bool = False) -> Span:
        """A span that begins now or began at `start_s`; `serves`: for a caller in another process.

        A `traceparent` that cannot be read is ignored: the span is the first of a new trace.
        """

    def close(self) -> None:
        """Send what has ended, for a few seconds at most."""


class TraceSettings(Settings):
    """Settings of traces besides OpenTelemetry's own variables."""

    trace_rounds: float = Field(
        default=0.0, ge=0, le=1, description="Share of the traced requests whose rounds are spans, too."
    )


@dataclass(frozen=True)
class Tracing:
    """How an orchestrator traces its requests."""

    tracer: Tracer
    # Share of the traced requests whose rounds are spans, too.
    rounds_share: float = 0.0


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
        from coppice.obs.otel import exporting_tracer
    except ImportError as error:
        logger.warning("nothing is traced: %s (the extra 'traces' has it)", error)
        return None
    return exporting_tracer(service, env)


def open_tracing(service: str, env: Mapping[str, str]) -> Tracing | None:
    """As `open_tracer`, for an orchestrator.

    Raises:
        ConfigError: TRACE_ROUNDS is no share.
    """
    settings = TraceSettings.from_env(env)
    tracer = open_tracer(service, env)
    return None if tracer is None else Tracing(tracer, settings.trace_rounds)
