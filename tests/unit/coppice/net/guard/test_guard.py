"""The guard between real sockets: what it lets through, what it holds, whom it hangs up on; others notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from coppice.net import frames
from coppice.net.guard import client_frames
from coppice.net.guard.guarded_server import Guard, GuardedServer
from coppice.net.guard.limits import GuardLimits
from coppice.net.guard.pending import BeginsCalls, PendingCalls
from tests import certificates
from tests.fakes import eventually
from tests.raw_http2 import PREFACE, Header, frame, header_block, read_frame

TIMEOUT_S = 10.0
SAY, ECHO, WATCH = "/coppice.test/Say", "/coppice.test/Echo", "/coppice.test/Watch"
STREAMING = frozenset({ECHO.encode()})
LIMITS = GuardLimits(8 << 20, 64, STREAMING, unary=frozenset({SAY.encode()}), first_message_s=1.0, preface_s=1.0)


@dataclass
class Calls(grpc.GenericRpcHandler):
    """Methods that take and give bytes as they are, and note who called."""

    started: list[dict[str, Any]] = field(default_factory=list)
    cancelled: int = 0

    def service(self, handler_call_details: Any) -> Any:
        if handler_call_details.method == SAY:
            return grpc.unary_unary_rpc_method_handler(self._say)
        if handler_call_details.method == ECHO:
            return grpc.stream_stream_rpc_method_handler(self._echo)
        if handler_call_details.method == WATCH:
            return grpc.unary_stream_rpc_method_handler(self._watch)
        return None

    def _note(self, context: Any) -> None:
        self.started.append(dict(context.invocation_metadata()))

    async def _say(self, request: bytes, context: Any) -> bytes:
        self._note(context)
        return request

    async def _echo(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self._note(context)
        async for request in requests:
            yield request

    async def _watch(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self._note(context)
        try:
            while True:
                yield request
                await asyncio.sleep(0.01)
        finally:
            # It is cancelled where it sleeps, or closed where it waits for its token to be written.
            self.cancelled += 1


@contextlib.asynccontextmanager
async def serving(
    limits: GuardLimits = LIMITS,
    context: Callable[[], ssl.SSLContext] | None = None,
    pending: PendingCalls | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> AsyncIterator[tuple[Calls, str]]:
    calls = Calls()
    options = [("grpc.max_receive_message_length", limits.max_message_bytes)]
    server = grpc.aio.server(options=options, interceptors=interceptors)
    server.add_generic_rpc_handlers([calls])
    guarded = GuardedServer(server, limits, context, pending)
    port = await guarded.start("127.0.0.1:0")
    try:
        yield calls, f"127.0.0.1:{port}"
    finally:
        await asyncio.wait_for(guarded.stop(0.0), TIMEOUT_S)


def channel(address: str) -> Any:
    return grpc.aio.insecure_channel(
        address, options=[("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    )


async def say(address: str, text: bytes = b"hello") -> bytes:
    async with channel(address) as one:
        answer: bytes = await one.unary_unary(SAY)(text, timeout=TIMEOUT_S)
        return answer


class Raw:
    """A client that sends what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))

    async def until(self, kind: int, stream: int | None = None) -> tuple[int, bytes]:
        """Flags and payload of the next frame of a kind."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                got, flags, number, payload = await read_frame(self.reader)
                if got == kind and stream in (None, number):
                    return flags, payload

    async def is_hung_up_on(self) -> int:
        """The code of GOAWAY, once the connection is closed."""
        _, payload = await self.until(frames.GOAWAY)
        async with asyncio.timeout(TIMEOUT_S):
            assert await self.reader.read() == b""
        return int.from_bytes(payload[4:8], "big")


@contextlib.asynccontextmanager
async def raw(address: str, *settings: tuple[int, int], preface: bytes = PREFACE) -> AsyncIterator[Raw]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    client = Raw(reader, writer)
    client.send(preface, frames.settings(settings))
    try:
        yield client
    finally:
        writer.transport.abort()


def opened(stream: int, path: str | bytes = SAY, more: Sequence[Header] = (), flags: int = 4) -> bytes:
    headers = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode() if isinstance(path, str) else path),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *more,
    ]
    return frame(frames.HEADERS, flags, stream, header_block(headers))


def message(text: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(text)) + text


def data(stream: int, payload: bytes, *, ends: bool = True) -> bytes:
    return frame(frames.DATA, int(ends), stream, payload)


async def test_calls_pass_with_the_clients_address_that_it_cannot_choose() -> None:
    async with serving() as (calls, address), channel(address) as one:
        method = one.unary_unary(SAY)
        assert (
            await method(b"hello", timeout=TIMEOUT_S, metadata=(("x-coppice-peer", "me"), ("x-own", "1"))) == b"hello"
        )
        assert await method(b"", timeout=TIMEOUT_S) == b""
        first, second = calls.started
        assert first["x-coppice-peer"] == second["x-coppice-peer"]
        assert first["x-coppice-peer"].startswith("127.0.0.1:")
        assert first["x-own"] == "1"


async def test_large_messages_and_many_calls_pass_both_ways() -> None:
    async with serving(GuardLimits(8 << 20, 64, STREAMING)) as (_, address), channel(address) as one:
        texts = [bytes((number,)) * size for number, size in enumerate([5_000_000, 1, 70_000, 33_000] * 6)]
        assert await asyncio.gather(*(one.unary_unary(SAY)(text, timeout=60) for text in texts)) == texts
        call = one.stream_stream(ECHO)(timeout=60)
        for text in texts[:6]:
            await call.write(text)
            assert await call.read() == text
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_a_call_without_a_message_never_reaches_the_server_and_is_ended() -> None:
    async with serving() as (calls, address), raw(address) as client:
        client.send(*(opened(stream) for stream in range(1, 101, 2)))
        client.send(data(3, message(b"there it is")))
        await client.until(frames.HEADERS, 3)
        assert len(calls.started) == 1
        flags_and_code = await client.until(frames.RST_STREAM, 1)
        assert flags_and_code[1] == struct.pack(">I", frames.CANCEL)
        assert len(calls.started) == 1


async def test_calls_that_are_opened_and_reset_cost_the_others_nothing() -> None:
    async with serving() as (calls, address), channel(address) as good:
        method = good.unary_unary(SAY)
        await method(b"warm", timeout=TIMEOUT_S)
        async with raw(address) as client:
            flood = b"".join(opened(stream) + frames.reset(stream, frames.CANCEL) for stream in range(1, 40_001, 2))
            client.send(flood)
            times_s = []
            for _ in range(50):
                started_s = time.monotonic()
                assert await method(b"hello", timeout=TIMEOUT_S) == b"hello"
                times_s.append(time.monotonic() - started_s)
                await asyncio.sleep(0.01)
        assert len(calls.started) == 51
        assert sorted(times_s)[25] < 0.1


async def test_a_client_that_opens_and_resets_much_is_read_no_faster_than_its_budget() -> None:
    async with serving() as (_, address), raw(address) as client:
        started_s = time.monotonic()
        client.send(*(opened(stream) + frames.reset(stream, frames.CANCEL) for stream in range(1, 3001, 2)))
        client.send(frame(frames.PING, 0, 0, b"12345678"))
        while not (await client.until(frames.PING))[0] & frames.ACK:
            pass
        # 1,500 calls cost 4,950 units: 3,000 at once and 1,000 a second.
        assert time.monotonic() - started_s > 1.5


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (opened(1, b"/coppice.test/S\xfcy"), frames.PROTOCOL_ERROR),
        (opened(1, b""), frames.PROTOCOL_ERROR),
        (opened(1, b"/" + b"x" * 100 + b"\n"), frames.PROTOCOL_ERROR),
        (opened(2), frames.PROTOCOL_ERROR),
        (opened(3) + opened(1), frames.PROTOCOL_ERROR),
        (data(1, b""), frames.PROTOCOL_ERROR),
        (frames.reset(1, 0), frames.PROTOCOL_ERROR),
        (frame(frames.WINDOW_UPDATE, 0, 5, b"\0\0\0\1"), frames.PROTOCOL_ERROR),
        (frame(frames.PING, 0, 0, b"1234567"), frames.PROTOCOL_ERROR),
        (frame(frames.PUSH_PROMISE, 4, 1, b"\0\0\0\2"), frames.PROTOCOL_ERROR),
        (frame(frames.CONTINUATION, 4, 1, b""), frames.PROTOCOL_ERROR),
        (opened(1, flags=0) + frame(frames.PING, 0, 0, b"12345678"), frames.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 4, 1, b"\xff\xff\xff\xff\xff\xff"), frames.COMPRESSION_ERROR),
        (frame(frames.HEADERS, 4, 1, b"\xc5"), frames.COMPRESSION_ERROR),
        (frame(frames.HEADERS, 12, 1, b"\xff"), frames.PROTOCOL_ERROR),
        (opened(1) + frame(frames.DATA, 8, 1, b"\x05ab"), frames.PROTOCOL_ERROR),
        (frame(frames.SETTINGS, 0, 0, b"12345"), frames.FRAME_SIZE_ERROR),
        (frame(frames.SETTINGS, 0, 0, b"\0\4\xff\xff\xff\xff"), frames.FLOW_CONTROL_ERROR),
        (b"\0\x40\1\0\0\0\0\0\1", frames.FRAME_SIZE_ERROR),
        (opened(1, flags=0) + frame(9, 0, 1, b"\0" * 16000) * 9, frames.ENHANCE_YOUR_CALM),
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", None),
    ],
)
async def test_a_client_that_breaks_the_rules_is_hung_up_on_and_nobody_else(bad: bytes, code: int | None) -> None:
    async with serving() as (calls, address), channel(address) as good:
        watch = good.unary_stream(WATCH)(b"tick", timeout=60)
        assert await watch.read() == b"tick"
        if code is None:
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(bad)
            await asyncio.wait_for(reader.read(), TIMEOUT_S)
            writer.close()
        else:
            async with raw(address) as client:
                client.send(bad)
                assert await client.is_hung_up_on() == code
        assert await watch.read() == b"tick"
        assert len(calls.started) == 1
        watch.cancel()


async def test_a_small_block_that_means_much_is_not_decoded_to_the_end() -> None:
    entry = b"\x40\x01a\x7f\xa1\x1e" + b"x" * 4000
    async with serving() as (_, address), raw(address) as client:
        # The entry is kept by the decoder (RFC 7541, 6.2.1) and then named thousands of times.
        client.send(frame(frames.HEADERS, 4, 1, entry + b"\xbe" * 10_000))
        assert await client.is_hung_up_on() == frames.COMPRESSION_ERROR
        assert await say(address) == b"hello"


@pytest.mark.parametrize(
    ("more", "status"),
    [([(b"x-text", b"\xfcber")], b"3"), ([(b"x-\xfc", b"y")], b"3"), ([(b"x-long", b"y" * 100)] * 120, b"8")],
)
async def test_metadata_that_is_no_text_or_too_much_is_answered_and_never_reaches_the_server(
    more: list[Header], status: bytes
) -> None:
    async with serving() as (calls, address), raw(address) as client:
        client.send(opened(1, more=more) + data(1, message(b"x")))
        flags, block = await client.until(frames.HEADERS, 1)
        assert flags & frames.END_STREAM
        assert b"grpc-status\x01" + status in block
        client.send(opened(3) + data(3, message(b"x")))
        await client.until(frames.HEADERS, 3)
        assert len(calls.started) == 1


async def test_bytes_of_calls_that_are_given_up_may_be_sent_again() -> None:
    async with serving() as (calls, address), raw(address) as client:
        # Ten times the connection's window: without credit the client would have to stop.
        stream, window = -1, 65535
        for _ in range(40):
            stream += 2
            part = message(b"x" * 20_000)[:16_000]
            client.send(opened(stream), data(stream, part, ends=False), frames.reset(stream, frames.CANCEL))
            window -= len(part)
            while window < 16_000:
                _, payload = await client.until(frames.WINDOW_UPDATE, 0)
                window += int.from_bytes(payload, "big")
        assert calls.started == []


async def test_data_of_calls_that_are_over_does_not_come_faster_than_others_bear() -> None:
    async with serving() as (_, address), channel(address) as good:
        method = good.unary_unary(SAY)
        await method(b"warm", timeout=TIMEOUT_S)
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(raw(address)) for _ in range(20)]
            for client in clients:
                client.send(opened(1), frames.reset(1, frames.CANCEL), data(1, b"x" * 100, ends=False) * 60_000)
            times_s = []
            for _ in range(30):
                started_s = time.monotonic()
                assert await method(b"hello", timeout=TIMEOUT_S) == b"hello"
                times_s.append(time.monotonic() - started_s)
                await asyncio.sleep(0.02)
        # Where everything is taken at once, the first waits until all of it has been: 4 s and more.
        assert max(times_s) < 2.5


async def test_who_sends_large_messages_on_streams_waits_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    # A window of a stream takes no larger ones.
    monkeypatch.setattr(client_frames, "_LARGE_BYTE_UNITS", 1 / 512)
    text = message(b"x" * 60_000)
    async with serving() as (_, address), channel(address) as good:
        method = good.unary_unary(SAY)
        await method(b"warm", timeout=TIMEOUT_S)
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(raw(address)) for _ in range(80)]
            for client in clients:
                client.send(opened(1, ECHO))
            # Until the shared budget is full again.
            await asyncio.sleep(1.0)
            for client in clients:
                # Together 9,300 units, of which there are 1,000 at once.
                client.send(*(data(1, text[at : at + 16_000], ends=False) for at in range(0, len(text), 16_000)))
            times_s = []
            for _ in range(20):
                started_s = time.monotonic()
                assert await method(b"hello", timeout=TIMEOUT_S) == b"hello"
                times_s.append(time.monotonic() - started_s)
                await asyncio.sleep(0.02)
            for client in clients:
                await client.until(frames.DATA, 1)
        # Where all is read at once and earned later, somebody waits for four seconds.
        assert max(times_s) < 1.5


class BeginsLater(BeginsCalls):
    """Begins with calls when it is let."""

    def __init__(self, pending: PendingCalls) -> None:
        super().__init__(pending)
        self.num_taken = 0
        self.may_begin = asyncio.Event()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        self.num_taken += 1
        await self.may_begin.wait()
        return await super().intercept_service(continuation, handler_call_details)


async def test_a_server_has_few_calls_that_it_has_not_begun_whatever_a_client_sends() -> None:
    pending = PendingCalls(8)
    begins = BeginsLater(pending)
    async with serving(pending=pending, interceptors=[begins]) as (calls, address), channel(address) as one:
        answers = [one.unary_unary(SAY)(b"%d" % number, timeout=TIMEOUT_S) for number in range(60)]
        await asyncio.sleep(0.5)
        assert begins.num_taken == 8
        assert calls.started == []
        begins.may_begin.set()
        assert [await answer for answer in answers] == [b"%d" % number for number in range(60)]
        assert not pending.is_full


async def test_calls_that_the_server_does_not_begin_are_not_waited_for_for_ever() -> None:
    pending = PendingCalls(8)
    async with serving(pending=pending) as (calls, address), channel(address) as one:
        watches = [one.unary_stream(WATCH)(b"x") for _ in range(8)]
        for watch in watches:
            await watch.read()
        assert pending.is_full
        # After a second; a call that ends makes room at once.
        started_s = time.monotonic()
        await one.unary_unary(SAY)(b"hello", timeout=TIMEOUT_S)
        assert time.monotonic() - started_s > 0.5
        for watch in watches:
            watch.cancel()
        await eventually(lambda: calls.cancelled == 8)


async def test_settings_are_the_first_frame_also_to_a_client_that_does_not_wait_for_them() -> None:
    """h2load and other strict clients close a connection whose first frame is another one."""
    begun = [opened(1), data(1, message(b"x")), opened(3), data(3, message(b"y" * 10_000))]
    async with serving() as (_, address):
        for _ in range(40):
            async with raw(address) as client:
                client.send(*begun)
                kind, flags, stream, _ = await read_frame(client.reader)
                assert (kind, flags, stream) == (frames.SETTINGS, 0, 0)
                await client.until(frames.DATA, 3)


async def test_a_call_of_one_message_has_no_second_one() -> None:
    async with serving() as (_, address), raw(address) as client:
        client.send(opened(1), data(1, message(b"x"), ends=False), data(1, message(b"") * 3000, ends=False))
        _, payload = await client.until(frames.RST_STREAM, 1)
        assert payload == struct.pack(">I", frames.PROTOCOL_ERROR)


async def test_a_client_that_takes_nothing_is_not_served_until_it_does() -> None:
    async with serving() as (calls, address), raw(address, (frames.SETTINGS_INITIAL_WINDOW_SIZE, 0)) as client:
        client.send(opened(1), data(1, message(b"x")), opened(3), data(3, message(b"y")))
        await asyncio.sleep(0.3)
        assert calls.started == []
        client.send(frames.window_update(3, 2000))
        await client.until(frames.HEADERS, 3)
        _, payload = await client.until(frames.DATA, 3)
        assert payload == message(b"y")
        client.send(frames.settings([(frames.SETTINGS_INITIAL_WINDOW_SIZE, 5000)]))
        _, payload = await client.until(frames.DATA, 1)
        assert payload == message(b"x")


async def test_a_client_that_hangs_up_or_cancels_ends_its_calls() -> None:
    async with serving() as (calls, address):
        async with channel(address) as one:
            watch = one.unary_stream(WATCH)(b"tick")
            await watch.read()
            watch.cancel()
            other = one.unary_stream(WATCH)(b"tock")
            assert await other.read() == b"tock"
        async with asyncio.timeout(TIMEOUT_S):
            while calls.cancelled < 2:  # noqa: ASYNC110  the server's own tasks
                await asyncio.sleep(0.01)


async def test_more_calls_than_a_connection_may_have_are_refused_for_another_try() -> None:
    limits = GuardLimits(1 << 20, 4, first_message_s=60.0)
    async with serving(limits) as (_, address), raw(address) as client:
        client.send(*(opened(stream) for stream in range(1, 11, 2)))
        _, payload = await client.until(frames.RST_STREAM, 9)
        assert payload == struct.pack(">I", frames.REFUSED_STREAM)
        client.send(frames.reset(1, 0), opened(11), data(11, message(b"x")))
        await client.until(frames.HEADERS, 11)


async def test_too_large_a_message_is_refused_before_it_is_there() -> None:
    async with serving(GuardLimits(1000, 64)) as (calls, address):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await say(address, b"x" * 2000)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await say(address, b"x" * 900) == b"x" * 900
        assert len(calls.started) == 1


async def test_what_is_held_for_all_is_bounded_and_who_holds_most_pays() -> None:
    limits = GuardLimits(1 << 20, 64, max_held_bytes=200_000)
    part = message(b"x" * 30_000)[:16_000]
    async with serving(limits) as (_, address), raw(address) as modest, raw(address) as greedy:
        modest.send(opened(1), data(1, part, ends=False))
        await asyncio.sleep(0.1)
        for stream in range(1, 27, 2):
            greedy.send(opened(stream), data(stream, part, ends=False))
        _, payload = await greedy.until(frames.RST_STREAM)
        assert payload == struct.pack(">I", frames.REFUSED_STREAM)
        modest.send(data(1, message(b"x" * 30_000)[16_000:30_000], ends=False), data(1, b"x" * 5))
        await modest.until(frames.HEADERS, 1)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_call_that_is_too_large_and_has_no_window_takes_room_from_nobody(leaves: bool) -> None:
    limits = GuardLimits(1 << 20, 64, max_held_bytes=200_000, first_message_s=1.0)
    window = (frames.SETTINGS_INITIAL_WINDOW_SIZE, 0)
    async with serving(limits) as (_, address), contextlib.AsyncExitStack() as stack:
        modest = await stack.enter_async_context(raw(address))
        part = message(b"x" * 30_000)
        modest.send(opened(1), data(1, part[:16_000], ends=False))
        async with raw(address, window) as greedy:
            greedy.send(opened(1), data(1, b"\0\xff\xff\xff\xff", ends=False))
            for _ in range(10 if leaves else 20):
                greedy.send(data(1, bytes(16_000), ends=False))
            if not leaves:
                _, payload = await greedy.until(frames.RST_STREAM, 1)
                assert payload == struct.pack(">I", frames.REFUSED_STREAM)
            await asyncio.sleep(0.1)
        modest.send(data(1, part[16_000:30_000], ends=False), data(1, part[30_000:]))
        await modest.until(frames.HEADERS, 1)
        # What the connection held is not counted any more.
        other = await stack.enter_async_context(raw(address))
        for stream in range(1, 21, 2):
            other.send(opened(stream), data(stream, part[:16_000], ends=False))
        await asyncio.sleep(0.1)
        other.send(data(19, part[16_000:30_000], ends=False), data(19, part[30_000:]))
        await other.until(frames.HEADERS, 19)


async def test_calls_of_health_and_reflection_are_few_on_one_connection() -> None:
    async with serving() as (calls, address), raw(address) as client:
        for stream in range(1, 2 * LIMITS.max_other + 2, 2):
            client.send(opened(stream, "/grpc.health.v1.Health/Watch"))
        _, payload = await client.until(frames.RST_STREAM, 2 * LIMITS.max_other + 1)
        assert payload == struct.pack(">I", frames.REFUSED_STREAM)
        client.send(opened(101), data(101, message(b"x")))
        await client.until(frames.HEADERS, 101)
        assert len(calls.started) == 1


async def test_entries_of_the_dynamic_table_cost_what_they_stand_for() -> None:
    entry = b"\x40\x01a\x7f\xa1\x1e" + b"x" * 4000
    heads = header_block([(b":method", b"POST"), (b":scheme", b"http"), (b":path", SAY.encode())])

    async def took_s(block: bytes) -> float:
        async with serving() as (_, address), raw(address) as client:
            client.send(frame(frames.HEADERS, 4, 1, heads + entry), frames.reset(1, 0))
            started_s = time.monotonic()
            last = 1001
            for stream in range(3, last + 2, 2):
                client.send(frame(frames.HEADERS, 4, stream, heads + block), frames.reset(stream, 0))
            client.send(opened(last + 4), data(last + 4, message(b"x")))
            await client.until(frames.HEADERS, last + 4)
            return time.monotonic() - started_s

    # 4,000 bytes each: 500 of them are 4,000 units, of which a connection has 3,000 and 1,000 a second.
    assert await took_s(b"\xbe") > await took_s(b"") + 0.5


async def test_large_messages_wait_for_each_other_and_none_is_lost() -> None:
    limits = GuardLimits(1 << 20, 64, max_large_bytes=300_000, max_large_bytes_of_one=200_000)
    async with serving(limits) as (_, address), channel(address) as one, channel(address) as other:
        text = b"x" * 150_000
        answers = await asyncio.gather(
            *(each.unary_unary(SAY)(text, timeout=30) for each in (one, other) for _ in range(10))
        )
        assert answers == [text] * 20


async def test_who_sends_slowly_makes_room_for_others() -> None:
    limits = GuardLimits(1 << 20, 64, max_large_bytes=300_000, max_large_bytes_of_one=300_000)
    async with serving(limits) as (_, address), raw(address) as slow:
        for stream in (1, 3):
            slow.send(opened(stream), data(stream, message(b"x" * 140_000)[:100], ends=False))
        await asyncio.sleep(2.1)
        assert await say(address, b"y" * 100_000) == b"y" * 100_000
        _, payload = await slow.until(frames.RST_STREAM, 1)
        assert payload == struct.pack(">I", frames.CANCEL)


async def test_connections_that_say_nothing_are_closed() -> None:
    async with serving() as (_, address):
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(TIMEOUT_S):
            assert await reader.read() == b""
        writer.close()


async def test_newcomers_get_in_when_all_places_are_taken_by_idle_connections() -> None:
    async with (
        serving(GuardLimits(1 << 20, 64, max_connections=4)) as (_, address),
        contextlib.AsyncExitStack() as stack,
    ):
        clients = [await stack.enter_async_context(raw(address)) for _ in range(6)]
        assert await say(address) == b"hello"
        assert await clients[0].is_hung_up_on() == frames.NO_ERROR


async def test_of_too_many_tls_handshakes_the_oldest_of_the_host_with_most_is_broken_off(tmp_path: Path) -> None:
    issued = certificates.directory(tmp_path / "tls", trustme.CA())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(issued.cert, issued.key)
    context.set_alpn_protocols(["h2"])
    limits = GuardLimits(1 << 20, 64, unary=frozenset({SAY.encode()}), max_handshakes=4)
    async with serving(limits, lambda: context) as (_, address), contextlib.AsyncExitStack() as stack:
        host, _, port = address.rpartition(":")
        silent = []
        # The first of all is another host's.
        for source in ("127.0.0.3", *["127.0.0.2"] * 8):
            reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
            stack.callback(writer.close)
            silent.append(reader)
            await asyncio.sleep(0.2)
        other = silent.pop(0)
        # Much less than a handshake may take.
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(silent[0].read(), 2.0) == b""
        trusted = grpc.ssl_channel_credentials(issued.contents()[0])
        async with grpc.aio.secure_channel(address, trusted) as one:
            assert await one.unary_unary(SAY)(b"hello", timeout=TIMEOUT_S) == b"hello"
        assert not silent[-1].at_eof()
        assert not other.at_eof()


async def test_a_host_that_floods_with_connections_gets_no_more_handshakes() -> None:
    limits = GuardLimits(1 << 20, 64, unary=frozenset({SAY.encode()}), max_handshakes=4)
    async with serving(limits) as (_, address), contextlib.AsyncExitStack() as stack:
        host, _, port = address.rpartition(":")
        silent = []
        for _ in range(6):
            reader, writer = await asyncio.open_connection(host, int(port), local_addr=("127.0.0.2", 0))
            stack.callback(writer.close)
            silent.append(reader)
        for refused in silent[4:]:
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(refused.read(), 2.0) == b""
        # Another host takes a place of theirs.
        assert await say(address) == b"hello"
        assert sum(reader.at_eof() for reader in silent[:4]) == 1


async def test_of_ended_connections_that_do_not_read_the_oldest_lose_what_they_were_sent(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    pings = frame(frames.PING, 0, 0, b"12345678") * 10_000
    upstream: list[asyncio.StreamWriter] = []

    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames.settings([]) + pings)
        upstream.append(writer)

    async with await asyncio.start_unix_server(flood, tmp_path / "grpc"):
        guard = Guard(str(tmp_path / "grpc"), LIMITS)
        port = guard.listen("127.0.0.1:0")
        # What does not fit into sockets is the guard's.
        guard._listeners[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        clients = []
        for _ in range(40):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(client, PREFACE + frames.settings([]))
            clients.append(client)
        await eventually(lambda: len(upstream) == len(clients))
        await asyncio.sleep(0.2)
        for client in clients:
            await loop.sock_sendall(client, opened(2))
            await asyncio.sleep(0.01)
        received = await asyncio.gather(*map(_until_closed, clients))
        await guard.stop()
        for writer in upstream:
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for writer in upstream), return_exceptions=True)
    # The reason why they were closed comes last.
    reason = frames.goaway(0, frames.PROTOCOL_ERROR)
    is_complete = [data.endswith(reason) for data in received]
    assert is_complete == [False] * 8 + [True] * 32


async def _until_closed(client: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 65536), TIMEOUT_S):
            received += data
    client.close()
    return received


async def test_calls_that_run_when_the_server_stops_go_on_to_their_end() -> None:
    calls = Calls()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([calls])
    guarded = GuardedServer(server, LIMITS)
    address = f"127.0.0.1:{await guarded.start('127.0.0.1:0')}"
    async with channel(address) as one:
        call = one.stream_stream(ECHO)()
        await call.write(b"before")
        assert await call.read() == b"before"
        stopping = asyncio.create_task(guarded.stop(TIMEOUT_S))
        await asyncio.sleep(0.2)
        await call.write(b"after")
        assert await call.read() == b"after"
        with pytest.raises((OSError, grpc.aio.AioRpcError)):
            await say(address)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        await asyncio.wait_for(stopping, TIMEOUT_S)
