"""Bytes that are no message are their sender's mistake, at every method of ours, and end in one status."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2_grpc

from coppice.client import RequestFailedError
from coppice.net.rpc import Server, errors_as_status, open_channel, streaming, unary
from coppice.v1 import drafter_pb2, drafter_pb2_grpc, inference_pb2, inference_pb2_grpc

GARBAGE = b"\xff\xff\xff"
# A request id that is no UTF-8: the bytes of a message but for its text.
NO_TEXT = b"\x0a\x02\xc3\x28"
TIMEOUT_S = 10.0


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    @streaming
    async def Generate(self, request: inference_pb2.GenerateRequest, context: object) -> AsyncIterator[object]:  # noqa: N802
        yield inference_pb2.GenerateResponse(text=request.prompt)

    @unary
    async def GetModelInfo(self, request: object, context: object) -> inference_pb2.GetModelInfoResponse:  # noqa: N802
        return inference_pb2.GetModelInfoResponse(model="toy")


class Drafts(drafter_pb2_grpc.DrafterServiceServicer):
    async def Draft(self, requests: AsyncIterator[drafter_pb2.DraftRequest], context: object) -> None:  # noqa: N802
        async with errors_as_status(context):
            async for request in requests:
                await context.write(drafter_pb2.DraftResponse(sequence_id=request.sequence_id))


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = Server([])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Inference(), server.grpc)
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(Drafts(), server.grpc)
    port = await server.start("127.0.0.1:0")
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


@pytest.mark.parametrize("data", [GARBAGE, NO_TEXT], ids=["garbage", "no text"])
async def test_a_call_with_such_a_request_is_invalid_and_tells_nothing_of_us(
    data: bytes, channel: grpc.aio.Channel
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in channel.unary_stream("/coppice.v1.InferenceService/Generate")(data, timeout=TIMEOUT_S):
            pass
    failed = RequestFailedError(raised.value)
    assert (failed.code, failed.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("request",))
    assert "DecodeError" not in failed.details
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await channel.unary_unary("/coppice.v1.InferenceService/GetModelInfo")(GARBAGE, timeout=TIMEOUT_S)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_is_answered_up_to_such_a_message(channel: grpc.aio.Channel) -> None:
    call = channel.stream_stream("/coppice.v1.DrafterService/Draft")(timeout=TIMEOUT_S)
    await call.write(drafter_pb2.DraftRequest(sequence_id=5).SerializeToString())
    assert drafter_pb2.DraftResponse.FromString(await call.read()).sequence_id == 5
    await call.write(GARBAGE)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_server_serves_on_and_other_services_are_left_alone(channel: grpc.aio.Channel) -> None:
    await test_a_call_with_such_a_request_is_invalid_and_tells_nothing_of_us(GARBAGE, channel)
    info = await inference_pb2_grpc.InferenceServiceStub(channel).GetModelInfo(inference_pb2.GetModelInfoRequest())
    assert info.model == "toy"
    health = health_pb2_grpc.HealthStub(channel)
    assert (await health.Check(StringValue(), timeout=TIMEOUT_S)).status
