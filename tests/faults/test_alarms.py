"""Which tracebacks in logs a fault run excuses: gRPC's own of headers that are no text, while bytes are changed."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest

from coppice.net import rpc
from coppice.obs.logs import TextFormatter
from tests.faults.alarms import TRACEBACK, Alarms, excused
from tests.raw_http2 import END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame, header_block, read_frame
from tests.stream_server import stream_server

FRAME = '  File "src/python/grpcio/grpc/_cython/_cygrpc/grpc_string.pyx.pxi", line 48, in grpc._cython.cygrpc._decode'
OURS = '  File "/srv/coppice/rpc.py", line 12, in unary'
NO_TEXT = "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xd9 in position 0: invalid continuation byte"
FLIPS = [(10.0, 11.0), (50.0, 51.0)]


def is_excused(*lines: str, now_s: float = 10.5) -> bool:
    alarms = Alarms("drafter 1")
    for line in lines:
        alarms.hear(f"[drafter 1] {line}", now_s)
    (alarm,) = alarms.heard
    return excused(alarm, FLIPS, slack_s=5.0)


@pytest.mark.parametrize("now_s", [10.0, 15.9, 50.5])
def test_headers_that_are_no_text_are_excused_while_bytes_are_changed(now_s: float) -> None:
    assert is_excused("2026 ERROR grpc._cython.cygrpc: x", TRACEBACK, FRAME, NO_TEXT, now_s=now_s)
    assert is_excused(TRACEBACK, FRAME, FRAME, NO_TEXT, "2026 INFO orchestrator: what came later", now_s=now_s)


@pytest.mark.parametrize("now_s", [9.9, 16.1, 60.0])
def test_at_other_times_they_are_not(now_s: float) -> None:
    assert not is_excused(TRACEBACK, FRAME, NO_TEXT, now_s=now_s)


@pytest.mark.parametrize(
    "lines",
    [
        (TRACEBACK, FRAME, OURS, NO_TEXT),
        (TRACEBACK, OURS, NO_TEXT),
        (TRACEBACK, FRAME, OURS, "    return decode(bytes)", NO_TEXT),
        (TRACEBACK, NO_TEXT),
        (TRACEBACK, FRAME),
        (TRACEBACK, FRAME, "ValueError: another error"),
        (TRACEBACK, FRAME, "UnicodeDecodeError: 'ascii' codec can't decode byte 0xd9"),
        ("2026 ERROR coppice.net.rpc: unexpected error, incident 5d41402abc4b",),
    ],
)
def test_all_else_fails_the_run(lines: tuple[str, ...]) -> None:
    assert not is_excused(*lines)


def test_a_traceback_behind_an_excused_one_is_an_alarm_of_its_own() -> None:
    alarms = Alarms("drafter 1")
    for line in (TRACEBACK, FRAME, NO_TEXT, TRACEBACK, OURS, NO_TEXT):
        alarms.hear(f"[drafter 1] {line}", 10.5)
    assert [excused(alarm, FLIPS, slack_s=5.0) for alarm in alarms.heard] == [True, False]


@pytest.mark.timeout(60)
async def test_what_grpc_logs_of_a_flipped_header_is_what_is_recognised(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(PREFACE))
        writer.write(frame(SETTINGS, 0, 0))
        while (await read_frame(reader))[0] != HEADERS:
            pass
        headers = [(b":status", b"200"), (b"content-type", b"application/grpc"), (b"x-text", b"grpc-\xf6")]
        writer.write(frame(HEADERS, END_HEADERS, 1, header_block(headers)))
        writer.write(frame(HEADERS, END_HEADERS | END_STREAM, 1, header_block([(b"grpc-status", b"5")])))
        await reader.read()

    async with stream_server(answer) as address, rpc.open_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/coppice.test/Say")(b"", timeout=10)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    records = [record for record in caplog.records if record.name == "grpc._cython.cygrpc"]
    assert records
    alarms = Alarms("orchestrator")
    for record in records:
        assert record.levelno == logging.ERROR
        for line in TextFormatter().format(record).splitlines():
            alarms.hear(f"[orchestrator] {line}", 10.5)
    assert all(excused(alarm, FLIPS, slack_s=5.0) for alarm in alarms.heard)
