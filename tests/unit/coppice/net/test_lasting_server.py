"""Servers that one call with a method that is no text must not end, over real sockets."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice.net import lasting_server, rpc
from tests.raw_http2 import call

NO_TEXT = b"/coppice.v1.Dra\xfcterService/Draft"
TIMEOUT_S = 20.0
RETRY_S = 0.05
# gRPC has a task of its own that fails, of which asyncio tells.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def lasting(server: rpc.Server) -> lasting_server.LastingServer:
    assert isinstance(server.grpc, lasting_server.LastingServer)
    return server.grpc


async def health(address: str) -> int:
    """What a new connection hears. A call that reaches a server as it ends is cut off, and tries again."""
    async with rpc.open_channel(address) as channel, asyncio.timeout(TIMEOUT_S):
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE):
                    raise
                await asyncio.sleep(RETRY_S)
                continue
            return int(answer.status)


@pytest.mark.timeout(90)
async def test_calls_whose_method_is_no_text_end_neither_the_server_nor_what_runs_on_it() -> None:
    server = rpc.Server([], guarded=False)
    address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    try:
        async with rpc.open_channel(address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            first = await watch.read()
            for number in range(1, 4):
                await call(address, NO_TEXT)
                assert await health(address) == health_pb2.HealthCheckResponse.NOT_SERVING
                assert lasting(server).num_ended == number
            # The call that was there before the first of them goes on.
            await server.set_serving(True)
            then = await asyncio.wait_for(watch.read(), TIMEOUT_S)
        assert (first.status, then.status) == (
            health_pb2.HealthCheckResponse.NOT_SERVING,
            health_pb2.HealthCheckResponse.SERVING,
        )
    finally:
        await asyncio.wait_for(server.stop(0.0), TIMEOUT_S)


@pytest.mark.timeout(60)
async def test_calls_of_a_server_that_has_ended_are_ended_in_their_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lasting_server, "DRAIN_S", 0.2)
    server = rpc.Server([], guarded=False)
    address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    try:
        async with rpc.open_channel(address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            with caplog.at_level(logging.ERROR, lasting_server.__name__):
                await call(address, NO_TEXT)
                code = await asyncio.wait_for(watch.code(), TIMEOUT_S)
        assert code is not grpc.StatusCode.OK
        assert await health(address) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert "restarting it" in caplog.text
    finally:
        await asyncio.wait_for(server.stop(0.0), TIMEOUT_S)


@pytest.mark.timeout(60)
async def test_a_server_that_is_stopped_stays_stopped() -> None:
    server = rpc.Server([], guarded=False)
    port = await server.start("127.0.0.1:0")
    await call(f"127.0.0.1:{port}", NO_TEXT)
    await asyncio.wait_for(server.stop(0.0), TIMEOUT_S)
    await asyncio.sleep(2 * lasting_server.LOOK_S)
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await asyncio.open_connection("127.0.0.1", port)
