"""A peer that says nothing any more, not even that it is gone, is lost after twice the keepalive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from coppice.net.rpc import MIN_PING_INTERVAL_MS, PEER_KEEPALIVE_MS, Server, open_channel
from coppice.v1 import drafter_pb2, drafter_pb2_grpc
from tests.faults.proxy import FaultProxy

KEEPALIVE_MS = 500


class Quiet(drafter_pb2_grpc.DrafterServiceServicer):
    """Answers a first message, and says nothing else."""

    async def Draft(self, requests: AsyncIterator[Any], context: Any) -> None:  # noqa: N802
        async for request in requests:
            await context.write(drafter_pb2.DraftResponse(sequence_id=request.sequence_id))


@pytest.fixture
async def proxy() -> AsyncIterator[FaultProxy]:
    server = Server([])
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(Quiet(), server.grpc)
    port = await server.start("127.0.0.1:0")
    async with FaultProxy(f"127.0.0.1:{port}").running() as proxy:
        yield proxy
    await server.stop(0)


async def test_a_silent_peer_is_lost_soon(proxy: FaultProxy) -> None:
    async with open_channel(proxy.address, keepalive_ms=KEEPALIVE_MS) as channel:
        call = drafter_pb2_grpc.DrafterServiceStub(channel).Draft()
        await call.write(drafter_pb2.DraftRequest(sequence_id=1))
        assert (await call.read()).sequence_id == 1
        proxy.half_open()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async with asyncio.timeout(15):
                await call.read()
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_services_do_not_ask_more_often_than_servers_allow() -> None:
    assert PEER_KEEPALIVE_MS > MIN_PING_INTERVAL_MS
