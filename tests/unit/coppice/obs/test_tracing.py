"""Tracing is off unless it is asked for, and what it sends comes from readings of the services' own clock."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan

from coppice.obs.otel import CLOSE_S, exporting_tracer, open_tracer, open_tracing
from tests.spans import CALLER, UNRECORDED_CALLER, KeptSpans, own_id, parent_id

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}
ROOT = Path(__file__).resolve().parents[4]

OFF = """
import sys
from coppice.obs.otel import open_tracer, open_tracing
import orchestrator.__main__, orchestrator.api.service, drafter_svc.__main__, verifier_svc.stream.sequence_traces
assert open_tracer("x", {}) is None and open_tracing("x", {"TRACE_ROUNDS": "1"}) is None
assert not [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
"""


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {**ENDPOINT, "OTEL_SDK_DISABLED": "true"},
        {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"},
    ],
    ids=str,
)
def test_nothing_is_traced_unless_a_collector_is_named(env: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    assert open_tracer("coppice-test", env) is None
    assert not caplog.records


def test_what_is_off_imports_nothing_but_the_api() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", OFF], check=True, cwd=ROOT, env=env, timeout=60)


def test_a_protocol_that_is_not_offered_traces_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert open_tracer("coppice-test", {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}) is None
    assert "http/protobuf" in caplog.text


def test_a_missing_package_traces_nothing_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    assert open_tracer("coppice-test", ENDPOINT) is None
    assert "the extra 'traces'" in caplog.text


@pytest.mark.parametrize("share", ["-0.1", "1.5", "nan", "many"])
def test_a_share_of_rounds_that_is_none_is_refused_by_name(share: str) -> None:
    with pytest.raises(ValueError, match="TRACE_ROUNDS"):
        open_tracing("coppice-test", {"TRACE_ROUNDS": share})


def test_spans_of_a_caller_are_its_children_and_garbage_begins_a_new_trace() -> None:
    spans = KeptSpans()
    tracer = spans.tracer()
    for index, caller in enumerate((CALLER, "", "nonsense", CALLER + "-" + "9" * 200, CALLER.replace("0af7", "xxxx"))):
        tracer.begin(str(index), caller).end({})
    first, *others = spans.all
    assert first.parent is not None
    assert (f"{first.context.trace_id:032x}", f"{first.parent.span_id:016x}") == (CALLER[3:35], CALLER[36:52])
    assert [parent_id(span) for span in others] == [None] * 4
    assert len({span.context.trace_id for span in spans.all}) == 5


def test_what_a_caller_does_not_record_nobody_records_but_its_trace_goes_on() -> None:
    spans = KeptSpans()
    span = spans.tracer().begin("request", UNRECORDED_CALLER)
    span.phase("part", 0.0, 1.0)
    span.event("news")
    span.end({"a": 1})
    assert not spans.all
    assert span.traceparent.startswith(CALLER[:35])
    assert span.traceparent.endswith("-00")


def test_phases_have_the_times_of_the_monotonic_clock() -> None:
    spans = KeptSpans()
    now_s, wall_s = time.monotonic(), time.time()
    span = spans.tracer().begin("request", start_s=now_s - 3)
    span.phase("part", now_s - 2, now_s - 1, {"a": 1})
    span.end({"b": [2]}, failed=True)
    part, request = spans.all
    assert parent_id(part) == own_id(request)
    times = [part.start_time, part.end_time, request.start_time]
    assert [round((at or 0) / 1e9 - wall_s, 1) for at in times] == [-2, -1, -3]
    assert (dict(part.attributes or {}), dict(request.attributes or {})) == ({"a": 1}, {"b": (2,)})
    assert not request.status.is_ok


@pytest.mark.parametrize("listens", [False, True], ids=["nobody there", "a hole"])
def test_a_collector_that_is_not_there_holds_a_service_up_for_seconds_at_most(
    listens: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("coppice.obs.otel.CLOSE_S", 0.3)
    caplog.set_level(logging.CRITICAL)
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        if listens:
            hole.listen()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{hole.getsockname()[1]}")
        tracer = exporting_tracer("coppice-test", os.environ)
        started_s = time.monotonic()
        for _ in range(5000):  # more than the queue holds
            tracer.begin("request").end({"a": 1})
        spent_s = time.monotonic() - started_s
        tracer.close()
        closed_s = time.monotonic() - started_s - spent_s
    assert spent_s < 5
    assert closed_s < CLOSE_S


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[trace_service_pb2.ExportTraceServiceRequest] = []

    def Export(self, request: Any, context: Any) -> trace_service_pb2.ExportTraceServiceResponse:  # noqa: N802
        self.sent.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def test_a_collector_gets_what_has_ended_when_a_service_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    tracer = open_tracer("coppice-test", os.environ)
    assert tracer is not None
    tracer.begin("request", CALLER, serves=True).end({"coppice.rounds": 7})
    tracer.close()
    server.stop(0)
    [[resource]] = [request.resource_spans for request in collector.sent]
    assert {pair.key: pair.value.string_value for pair in resource.resource.attributes}[
        "service.name"
    ] == "coppice-test"
    [[span]] = [scope.spans for scope in resource.scope_spans]
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("request", CALLER[3:35], CALLER[36:52])
    assert [(pair.key, pair.value.int_value) for pair in span.attributes] == [("coppice.rounds", 7)]


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({}, "coppice-test"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=ours,zone=a"}, "ours"),
    ],
    ids=str,
)
def test_a_service_has_the_name_that_it_is_given(
    env: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    tracer = exporting_tracer("coppice-test", env)
    span = tracer.begin("request")._span
    assert isinstance(span, ReadableSpan)
    assert span.resource.attributes["service.name"] == name
    tracer.close()
