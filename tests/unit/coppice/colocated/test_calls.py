"""Calls in memory end, wait and fail as calls of gRPC do; messages arrive as they were sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from coppice.colocated.channel import InMemoryNetwork
from coppice.colocated.exchange import MAX_ON_THE_WAY
from coppice.colocated.server import InMemoryServer
from coppice.core.errors import OverloadedError
from coppice.net.rpc import errors_as_status, unary
from coppice.v1 import drafter_pb2, drafter_pb2_grpc


class Echo(drafter_pb2_grpc.DrafterServiceServicer):
    """Answers every message with its own sequence, and notes what becomes of calls."""

    def __init__(self) -> None:
        self.num_heard = 0
        self.is_cancelled = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def Draft(self, requests: Any, context: Any) -> None:  # noqa: N802
        async with errors_as_status(context):
            try:
                async for request in requests:
                    self.num_heard += 1
                    if request.sequence_id == 13:
                        raise OverloadedError("no room", retry_after_s=2.0)
                    if request.sequence_id == 14:
                        raise ValueError("secret")
                    await self.may_answer.wait()
                    await context.write(drafter_pb2.DraftResponse(sequence_id=request.sequence_id))
            except asyncio.CancelledError:
                self.is_cancelled.set()
                raise

    @unary
    async def Describe(self, request: Any, context: Any) -> drafter_pb2.DrafterServiceDescribeResponse:  # noqa: N802
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.is_cancelled.set()
            raise
        return drafter_pb2.DrafterServiceDescribeResponse(kind="echo")


class Wire:
    """A servicer, its server and a stub of it."""

    def __init__(self) -> None:
        self.servicer, self.server, network = Echo(), InMemoryServer(), InMemoryNetwork()
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(self.servicer, self.server)
        network.serve("echo", self.server)
        self.channel = network.dial("echo")
        self.stub: Any = drafter_pb2_grpc.DrafterServiceStub(self.channel)
        self.nobody: Any = drafter_pb2_grpc.DrafterServiceStub(network.dial("nobody"))


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    one = Wire()
    yield one
    await one.channel.close()
    await one.server.stop(0)
    assert one.server.num_calls == 0


def message(number: int) -> drafter_pb2.DraftRequest:
    return drafter_pb2.DraftRequest(sequence_id=number)


async def test_messages_are_answered_in_order_and_none_is_taken_after_the_end(wire: Wire) -> None:
    call = wire.stub.Draft()
    await call.wait_for_connection()
    for number in (1, 2, 3):
        await call.write(message(number))
    responses = aiter(call)
    assert [(await anext(responses)).sequence_id for _ in range(3)] == [1, 2, 3]
    call.cancel()
    assert call.done()
    with pytest.raises(asyncio.CancelledError):
        await call.write(message(4))


async def test_a_message_is_handed_over_as_it_is_and_after_the_writers_turn(wire: Wire) -> None:
    call = wire.stub.Draft()
    await asyncio.sleep(0)
    await call.write(message(1))
    assert wire.servicer.num_heard == 0
    await asyncio.sleep(0)
    assert wire.servicer.num_heard == 1
    call.cancel()


async def test_a_writer_waits_while_its_reader_is_behind_and_no_longer_than_the_call_lasts(wire: Wire) -> None:
    wire.servicer.may_answer.clear()
    call = wire.stub.Draft()
    for number in range(MAX_ON_THE_WAY + 1):
        await call.write(message(100 + number))
        await asyncio.sleep(0)
    writing = asyncio.create_task(call.write(message(1)))
    await asyncio.sleep(0.01)
    assert not writing.done()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing


async def test_cancelling_reaches_the_server_and_ends_the_reading(wire: Wire) -> None:
    call = wire.stub.Draft()
    await call.write(message(1))
    responses = aiter(call)
    assert (await anext(responses)).sequence_id == 1
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await anext(responses)
    async with asyncio.timeout(5):
        await wire.servicer.is_cancelled.wait()


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(13, grpc.StatusCode.RESOURCE_EXHAUSTED, "no room"), (14, grpc.StatusCode.INTERNAL, "internal error, incident")],
)
async def test_an_error_becomes_the_status_behind_what_was_said_before(
    wire: Wire, number: int, code: grpc.StatusCode, words: str
) -> None:
    call = wire.stub.Draft()
    await call.write(message(1))
    await call.write(message(number))
    responses = aiter(call)
    assert (await anext(responses)).sequence_id == 1
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await anext(responses)
    assert raised.value.code() == code
    assert words in str(raised.value.details())
    assert "secret" not in str(raised.value.details())


async def test_a_deadline_ends_the_call_on_both_sides(wire: Wire) -> None:
    wire.servicer.may_answer.clear()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await wire.stub.Describe(drafter_pb2.DrafterServiceDescribeRequest(), timeout=0.02)
    assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(5):
        await wire.servicer.is_cancelled.wait()


async def test_a_caller_that_is_cancelled_cancels_the_method(wire: Wire) -> None:
    wire.servicer.may_answer.clear()
    asking = asyncio.create_task(wire.stub.Describe(drafter_pb2.DrafterServiceDescribeRequest()))
    await asyncio.sleep(0.01)
    asking.cancel()
    async with asyncio.timeout(5):
        await wire.servicer.is_cancelled.wait()


async def test_nobody_there_is_unavailable_and_a_server_that_stops_lets_calls_finish_first(wire: Wire) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await wire.nobody.Describe(drafter_pb2.DrafterServiceDescribeRequest(), timeout=5)
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
    wire.servicer.may_answer.clear()
    asking = asyncio.create_task(wire.stub.Describe(drafter_pb2.DrafterServiceDescribeRequest()))
    stream = wire.stub.Draft()
    await asyncio.sleep(0.01)
    stopping = asyncio.create_task(wire.server.stop(0.2))
    await asyncio.sleep(0.01)
    wire.servicer.may_answer.set()
    assert (await asking).kind == "echo"
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await anext(aiter(stream))
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
    await stopping
    with pytest.raises(grpc.aio.AioRpcError):
        await wire.stub.Draft().wait_for_connection()


async def test_a_method_that_is_not_there_is_unimplemented(wire: Wire) -> None:
    call = wire.channel.stream_stream("/coppice.v1.VerifierService/Verify")()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.wait_for_connection()
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED
