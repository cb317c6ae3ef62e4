"""The loop channel and servers of gRPC: what gRPC's own client would get, errors and deadlines included."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from google.protobuf.any_pb2 import Any as ProtoAny
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from coppice.net import frames
from coppice.net.certificates import Certificates, server_credentials
from coppice.net.loop import channel as loop_channel
from coppice.net.loop.channel import LoopChannel
from tests.certificates import directory, issue
from tests.fakes import eventually
from tests.raw_http2 import read_frame
from tests.stream_server import stream_server

ECHO, COUNT, FLOOD, REFUSE, HANG = (f"/coppice.test/{name}" for name in ("Echo", "Count", "Flood", "Refuse", "Hang"))
TIMEOUT_S = 10.0
FLOOD_BYTES, NUM_FLOOD = 8 * 1024, 200


class Methods(grpc.GenericRpcHandler):
    """Methods that take and give bytes as they are."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.left_s = 0.0
        self.num_sent = 0
        self.num_running = 0

    def service(self, handler_call_details: Any) -> Any:
        name = handler_call_details.method.rpartition("/")[2].lower()
        method = getattr(self, f"_{name}", None)
        return None if method is None else grpc.unary_stream_rpc_method_handler(method)

    async def _echo(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.metadata = dict(context.invocation_metadata())
        self.left_s = context.time_remaining()
        yield request

    async def _count(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(int(request)):
            yield str(number).encode()
            await asyncio.sleep(0.01)

    async def _flood(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for self.num_sent in range(1, NUM_FLOOD + 1):
            yield bytes(FLOOD_BYTES)

    async def _refuse(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"one"
        delay = Duration()
        delay.FromMilliseconds(1500)
        packed = ProtoAny()
        packed.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        status = status_pb2.Status(code=8, message="zu viel: 100 %", details=[packed])
        await context.abort_with_status(rpc_status.to_status(status))

    async def _hang(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.num_running += 1
        try:
            yield b"begun"
            await asyncio.sleep(600)
        finally:
            self.num_running -= 1


@contextlib.asynccontextmanager
async def serving(
    port: int = 0, credentials: grpc.ServerCredentials | None = None, **options: int
) -> AsyncIterator[tuple[Methods, str, grpc.aio.Server]]:
    methods = Methods()
    server = grpc.aio.server(
        options=[(f"grpc.{name}", value) for name, value in {"so_reuseport": 0, **options}.items()]
    )
    server.add_generic_rpc_handlers([methods])
    address = f"127.0.0.1:{port}"
    bound = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    await server.start()
    try:
        yield methods, f"127.0.0.1:{bound}", server
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def channel_to(
    address: str, certificates: Certificates | None = None, **times: float
) -> AsyncIterator[LoopChannel]:
    channel = LoopChannel(address, certificates, **times)
    try:
        yield channel
    finally:
        await channel.close()


async def all_of(channel: LoopChannel, path: str, request: bytes = b"", timeout_s: float = TIMEOUT_S) -> list[bytes]:
    return [message async for message in channel.call(path, request, bytes, timeout_s=timeout_s)]


async def refused(channel: LoopChannel, path: str, request: bytes = b"", timeout_s: float = TIMEOUT_S) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await all_of(channel, path, request, timeout_s)
    return caught.value


async def test_messages_come_in_order_and_metadata_and_deadline_arrive() -> None:
    async with serving() as (methods, address, _), channel_to(address) as channel:
        assert await all_of(channel, COUNT, b"5") == [b"0", b"1", b"2", b"3", b"4"]
        call = channel.call(ECHO, b"hello", bytes.decode, (("x-one", "1"), ("authorization", "Bearer x")), 7.0)
        assert [message async for message in call] == ["hello"]
    assert methods.metadata.items() >= {"x-one": "1", "authorization": "Bearer x"}.items()
    assert 5 < methods.left_s <= 7


@pytest.mark.parametrize("size", [0, 1, 16384, 70_000, 3_000_000])
async def test_messages_of_any_size_pass_both_ways(size: int) -> None:
    async with serving(max_receive_message_length=-1) as (_, address, _), channel_to(address) as channel:
        request = bytes(number % 251 for number in range(1000)) * (size // 1000) + bytes(size % 1000)
        assert await all_of(channel, ECHO, request) == [request]


async def test_calls_share_a_connection_and_wait_where_the_server_takes_no_more_at_once() -> None:
    async with serving(max_concurrent_streams=2) as (_, address, _), channel_to(address) as channel:
        await all_of(channel, ECHO)
        answers = await asyncio.gather(*(all_of(channel, COUNT, b"3") for _ in range(20)))
        assert answers == [[b"0", b"1", b"2"]] * 20
        assert len(channel._connections) == 1


async def test_a_server_that_refuses_every_call_is_asked_some_times_only() -> None:
    num_asked = 0

    async def refusing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        await reader.readexactly(len(frames.PREFACE))
        writer.write(frames.settings([]))
        while True:
            kind, _, number, _ = await read_frame(reader)
            if kind == frames.HEADERS:
                num_asked += 1
                writer.write(frames.reset(number, frames.REFUSED_STREAM))

    async with stream_server(refusing) as address, channel_to(address) as channel, asyncio.timeout(5):
        assert (await refused(channel, ECHO)).code() == grpc.StatusCode.UNAVAILABLE
    assert 1 < num_asked < 10


async def test_an_error_has_its_status_details_and_trailers_after_the_messages() -> None:
    async with serving() as (_, address, _), channel_to(address) as channel:
        call = channel.call(REFUSE, b"", bytes)
        assert await anext(call) == b"one"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(call)
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "zu viel: 100 %")
        details = dict(caught.value.trailing_metadata())["grpc-status-details-bin"]
        assert status_pb2.Status.FromString(details).details[0].Is(error_details_pb2.RetryInfo.DESCRIPTOR)
        assert (await refused(channel, "/coppice.test/Nothing")).code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("parse", [bytes.decode, status_pb2.Status.FromString])
async def test_a_message_that_cannot_be_read_ends_the_call_here_and_there(parse: Any) -> None:
    async with serving() as (_, address, _), channel_to(address) as channel:
        call = channel.call(ECHO, b"\xff", parse)
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be read") as caught:
            await anext(call)
        assert (caught.value.code(), call.has_ended) == (grpc.StatusCode.INTERNAL, True)


async def test_a_deadline_ends_a_call_here_and_there() -> None:
    async with serving() as (methods, address, _), channel_to(address) as channel:
        error = await refused(channel, HANG, timeout_s=0.2)
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: not methods.num_running, TIMEOUT_S)


async def test_a_cancelled_call_ends_at_the_server_and_leaves_the_others() -> None:
    async with serving() as (methods, address, _), channel_to(address) as channel:
        call = channel.call(HANG, b"", bytes)
        assert await anext(call) == b"begun"
        other = asyncio.create_task(all_of(channel, COUNT, b"20"))
        reading = asyncio.ensure_future(anext(call))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await eventually(lambda: not methods.num_running, TIMEOUT_S)
        assert len(await other) == 20


async def test_a_slow_reader_slows_the_server_down_and_loses_nothing() -> None:
    async with serving() as (methods, address, _), channel_to(address) as channel:
        call = channel.call(FLOOD, b"", bytes)
        await anext(call)
        await asyncio.sleep(0.5)
        # Not read: 64 KiB of window, and what gRPC's own buffers take.
        assert methods.num_sent * FLOOD_BYTES < 400 * 1024
        # Others of the connection are not held up.
        assert await all_of(channel, COUNT, b"3") == [b"0", b"1", b"2"]
        assert [len(message) async for message in call] == [FLOOD_BYTES] * (NUM_FLOOD - 1)


async def test_a_server_that_stops_finishes_what_it_has_and_a_new_one_is_found() -> None:
    async with contextlib.AsyncExitStack() as stack:
        _, address, server = await stack.enter_async_context(serving())
        channel = await stack.enter_async_context(channel_to(address))
        running = asyncio.create_task(all_of(channel, COUNT, b"50"))
        await eventually(lambda: bool(channel._connections), TIMEOUT_S)
        await asyncio.sleep(0.1)
        stopping = asyncio.create_task(server.stop(TIMEOUT_S))
        await asyncio.sleep(0.1)
        assert (await refused(channel, ECHO)).code() == grpc.StatusCode.UNAVAILABLE
        assert len(await running) == 50
        await stopping
        await stack.enter_async_context(serving(int(address.rpartition(":")[2])))
        assert await all_of(channel, ECHO, b"again") == [b"again"]
        assert len(channel._connections) == 1


async def test_a_lost_connection_fails_its_calls_and_the_next_call_connects_again() -> None:
    async with serving() as (_, address, _), channel_to(address) as channel:
        call = channel.call(HANG, b"", bytes)
        await anext(call)
        (connection,) = channel._connections
        assert connection._transport is not None
        connection._transport.abort()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(call)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert await all_of(channel, ECHO, b"again") == [b"again"]


async def test_nobody_at_the_address_is_told_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with channel_to(f"127.0.0.1:{taken.getsockname()[1]}") as channel, asyncio.timeout(2):
            assert (await refused(channel, ECHO)).code() == grpc.StatusCode.UNAVAILABLE
    async with channel_to("no-such-name.invalid:1") as channel:
        assert (await refused(channel, ECHO)).code() == grpc.StatusCode.UNAVAILABLE


async def test_an_address_of_a_name_that_is_dead_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (_, address, _), channel_to(address) as channel:
        port = int(address.rpartition(":")[2])
        loop, places = asyncio.get_running_loop(), [("127.0.0.2", port), ("127.0.0.1", port)]

        async def found(*_: Any, **__: Any) -> list[Any]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]

        with monkeypatch.context() as patch:
            patch.setattr(type(loop), "getaddrinfo", found, raising=False)
            assert await all_of(channel, ECHO, b"there") == [b"there"]


async def test_a_server_that_falls_silent_is_lost() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames.settings([]))
        await reader.read(-1)

    async with stream_server(silent) as address, channel_to(address, silence_s=0.2, answer_s=0.2) as channel:
        async with asyncio.timeout(5):
            error = await refused(channel, ECHO, timeout_s=60)
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "the server is silent")


async def test_what_takes_connections_and_says_nothing_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_channel, "CONNECT_S", 0.2)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)

    async with stream_server(silent) as address, channel_to(address) as channel, asyncio.timeout(5):
        assert (await refused(channel, ECHO, timeout_s=60)).code() == grpc.StatusCode.UNAVAILABLE


async def test_a_quiet_server_that_answers_pings_is_kept() -> None:
    often = {"http2.min_ping_interval_without_data_ms": 10}
    async with (
        serving(0, None, **often) as (_, address, _),
        channel_to(address, silence_s=0.1, answer_s=0.2) as channel,
    ):
        call = channel.call(HANG, b"", bytes)
        await anext(call)
        (connection,) = channel._connections
        await asyncio.sleep(1.0)
        assert channel._connections == {connection}
        assert not connection.is_lost


async def test_tls_checks_the_server_s_name_and_shows_the_caller_s_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    files = directory(tmp_path / "tls", authority)
    other = directory(tmp_path / "other", trustme.CA())
    credentials = server_credentials(Certificates(files.mutual()))
    async with serving(credentials=credentials) as (_, address, _):
        async with channel_to(address, Certificates(files.caller())) as channel:
            assert await all_of(channel, ECHO, b"private") == [b"private"]
        for certificates in (Certificates(other.caller()), Certificates(files.caller("example.com")), None):
            async with channel_to(address, certificates) as channel:
                assert (await refused(channel, ECHO)).code() == grpc.StatusCode.UNAVAILABLE


async def test_a_server_s_certificate_that_is_not_valid_yet_is_refused_at_once(tmp_path: Path) -> None:
    files = directory(tmp_path / "tls", trustme.CA(), early=True)
    _, key, cert = files.contents()
    credentials = grpc.ssl_server_credentials([(key, cert)])
    async with (
        serving(credentials=credentials) as (_, address, _),
        channel_to(address, Certificates(files.anonymous())) as channel,
    ):
        error = await refused(channel, ECHO)
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "certificate is not yet valid" in error.details()


async def test_certificates_that_have_changed_are_used_by_the_next_connection(tmp_path: Path) -> None:
    authority, renewed = trustme.CA(), trustme.CA()
    files = directory(tmp_path / "tls", authority)
    certificates = Certificates(files.caller())
    async with contextlib.AsyncExitStack() as stack:
        channel: LoopChannel | None = None
        port = 0
        for one in (authority, renewed):
            files.swap(one.issue_cert("127.0.0.1"), one)
            async with serving(port, server_credentials(Certificates(files.mutual()))) as (_, address, _):
                port = int(address.rpartition(":")[2])
                if channel is None:
                    channel = await stack.enter_async_context(channel_to(address, certificates))
                assert await all_of(channel, ECHO, b"private") == [b"private"]


@pytest.mark.parametrize("change", ["half", "expired"])
async def test_certificates_that_cannot_be_used_leave_the_old_ones_in_use(tmp_path: Path, change: str) -> None:
    authority = trustme.CA()
    files = directory(tmp_path / "tls", authority)
    server = directory(tmp_path / "server", authority)
    async with contextlib.AsyncExitStack() as stack:
        channel: LoopChannel | None = None
        port = 0
        for number in range(2):
            async with serving(port, server_credentials(Certificates(server.mutual()))) as (_, address, _):
                port = int(address.rpartition(":")[2])
                if channel is None:
                    channel = await stack.enter_async_context(channel_to(address, Certificates(files.caller())))
                assert await all_of(channel, ECHO, b"private") == [b"private"], number
            if change == "half":
                files.overwrite_key(authority.issue_cert("127.0.0.1"))
            else:
                files.swap(issue(authority, expired=True), authority)


async def test_a_closed_channel_fails_what_runs_and_what_comes() -> None:
    async with serving() as (_, address, _):
        channel = LoopChannel(address)
        call = channel.call(HANG, b"", bytes)
        await anext(call)
        await channel.close()
        for one in (call, channel.call(ECHO, b"", bytes)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(one)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
