"""Servers and errors over real sockets: statuses with details, health, reflection, draining."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from coppice.core.errors import (
    CoppiceError,
    IncompatibleError,
    InvalidRequestError,
    InvalidTreeError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from coppice.net.message_writer import MessageWriter
from coppice.net.rpc import (
    LIVENESS,
    MAX_MESSAGE_BYTES,
    MAX_STATUS_BYTES,
    Server,
    conversing,
    open_channel,
    status_code_name,
    streaming,
    unary,
)
from coppice.v1 import inference_pb2, inference_pb2_grpc, verifier_pb2, verifier_pb2_grpc

SERVICE = "coppice.v1.InferenceService"
SECRET = "password=hunter2"

Act = Callable[[], None]


class ScriptedService(inference_pb2_grpc.InferenceServiceServicer):
    """Sends one message and then does what the test says."""

    def __init__(self, act: Act) -> None:
        self._act = act
        self.cleaned_up = asyncio.Event()

    @streaming
    async def Generate(  # noqa: N802 - the name is gRPC's
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse],
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        try:
            yield inference_pb2.GenerateResponse(text="first")
            if request.request_id == "wait":
                await asyncio.sleep(3600)
            self._act()
        finally:
            self.cleaned_up.set()

    @unary
    async def GetModelInfo(  # noqa: N802 - the name is gRPC's
        self,
        request: inference_pb2.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[inference_pb2.GetModelInfoRequest, inference_pb2.GetModelInfoResponse],
    ) -> inference_pb2.GetModelInfoResponse:
        self._act()
        return inference_pb2.GetModelInfoResponse(model="scripted")


def fail_with(error: Exception) -> Act:
    def act() -> None:
        raise error

    return act


@contextlib.asynccontextmanager
async def serving(act: Act) -> AsyncIterator[tuple[Server, grpc.aio.Channel, ScriptedService]]:
    server = Server([SERVICE])
    service = ScriptedService(act)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server.grpc)
    port = await server.start("127.0.0.1:0")
    await server.set_serving(True)
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield server, channel, service
    finally:
        await server.stop(grace_s=0)


async def failure_of(act: Act) -> grpc.aio.AioRpcError:
    """The error of a unary call, after checking that a stream fails in the same way."""
    async with serving(act) as (_, channel, _):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(), timeout=10)
        assert (await call.read()).text == "first"
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=10)
        assert streamed.value.code() == caught.value.code()
        return caught.value


async def test_a_bad_request_names_its_field() -> None:
    error = await failure_of(fail_with(InvalidRequestError("sampling.top_p", "must be in (0, 1], got 2")))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "sampling.top_p: must be in (0, 1], got 2"
    status = rpc_status.from_call(error)
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    [violation] = bad_request.field_violations
    assert (violation.field, violation.description) == ("sampling.top_p", "must be in (0, 1], got 2")


@pytest.mark.parametrize("text", ["(" * 300_000, "\N{DECIDUOUS TREE}" * 100_000])
async def test_a_long_text_is_cut_to_what_clients_take(text: str) -> None:
    """gRPC's clients refuse more than 16 KiB of metadata, and lose the status with it."""
    error = await failure_of(fail_with(InvalidRequestError("guided", f"no grammar: {text}")))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (error.details() or "").startswith("guided: no grammar: " + text[0])
    assert len((error.details() or "").encode()) <= MAX_STATUS_BYTES + 3


async def test_overload_says_when_to_come_back() -> None:
    error = await failure_of(fail_with(OverloadedError("the queue is full", retry_after_s=1.5)))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = error_details_pb2.RetryInfo()
    assert rpc_status.from_call(error).details[0].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidTreeError("node 0 names parent 3"), grpc.StatusCode.INVALID_ARGUMENT),
        (IncompatibleError("tokenizers differ"), grpc.StatusCode.FAILED_PRECONDITION),
        (UnsupportedError("not in this version"), grpc.StatusCode.UNIMPLEMENTED),
        (UnavailableError("the verifier is gone"), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_each_error_has_its_status(error: CoppiceError, code: grpc.StatusCode) -> None:
    caught = await failure_of(fail_with(error))
    assert (caught.code(), caught.details()) == (code, str(error))


async def test_an_unexpected_error_keeps_its_text_to_our_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="coppice.net.rpc"):
        error = await failure_of(fail_with(ValueError(SECRET)))
    assert error.code() == grpc.StatusCode.INTERNAL
    details = error.details() or ""
    assert SECRET not in details
    assert SECRET not in repr(error.trailing_metadata())
    incident = details.rsplit(" ", 1)[-1]
    assert incident in caplog.text
    assert SECRET in caplog.text


async def test_cancelling_a_stream_ends_its_generator() -> None:
    async with serving(lambda: None) as (_, channel, service):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(request_id="wait"), timeout=60)
        assert (await call.read()).text == "first"
        call.cancel()
        async with asyncio.timeout(10):
            await service.cleaned_up.wait()


async def test_a_stream_past_its_deadline_ends_its_generator() -> None:
    async with serving(lambda: None) as (_, channel, service):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(request_id="wait"), timeout=0.5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [response async for response in call]
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(10):
            await service.cleaned_up.wait()


async def test_health_follows_the_server() -> None:
    kinds = health_pb2.HealthCheckResponse
    server = Server([SERVICE])
    port = await server.start("127.0.0.1:0")
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def check(name: str) -> int:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            return int(answer.status)

        assert [await check(""), await check(SERVICE)] == [kinds.NOT_SERVING] * 2
        assert await check(LIVENESS) == kinds.SERVING
        await server.set_serving(True)
        assert [await check(""), await check(SERVICE), await check(LIVENESS)] == [kinds.SERVING] * 3
        await server.set_serving(False)
        assert [await check(""), await check(SERVICE)] == [kinds.NOT_SERVING] * 2
        assert await check(LIVENESS) == kinds.SERVING
        await server.stop(grace_s=0)


async def test_reflection_lists_the_services() -> None:
    async with serving(lambda: None) as (_, channel, _):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10)
        [answer] = [answer async for answer in call]
        names = {service.name for service in answer.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_a_message_beyond_the_limit_is_refused_before_it_is_read() -> None:
    server = Server([SERVICE])
    service = ScriptedService(lambda: None)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server.grpc)
    port = await server.start("127.0.0.1:0")
    # A caller that keeps to no limit.
    unbounded = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=unbounded) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(prompt="x" * (MAX_MESSAGE_BYTES + 1)), timeout=30)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not service.cleaned_up.is_set()
        # The connection lives on.
        assert (await stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=10)).model == "scripted"
    await server.stop(0)


async def test_stopping_lets_a_call_in_flight_finish() -> None:
    server = Server([SERVICE])
    going_on = asyncio.Event()

    class SlowService(inference_pb2_grpc.InferenceServiceServicer):
        @unary
        async def GetModelInfo(  # noqa: N802 - the name is gRPC's
            self,
            request: inference_pb2.GetModelInfoRequest,
            context: grpc.aio.ServicerContext[inference_pb2.GetModelInfoRequest, inference_pb2.GetModelInfoResponse],
        ) -> inference_pb2.GetModelInfoResponse:
            going_on.set()
            await asyncio.sleep(0.2)
            return inference_pb2.GetModelInfoResponse(model="slow")

    inference_pb2_grpc.add_InferenceServiceServicer_to_server(SlowService(), server.grpc)
    port = await server.start("127.0.0.1:0")
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=10)
        answer = asyncio.ensure_future(_await(call))
        await going_on.wait()
        await server.stop(grace_s=5)
        assert (await answer).model == "slow"


async def _await(
    call: grpc.aio.UnaryUnaryCall[inference_pb2.GetModelInfoRequest, inference_pb2.GetModelInfoResponse],
) -> inference_pb2.GetModelInfoResponse:
    return await call


async def test_a_second_server_on_the_same_port_fails() -> None:
    first = Server([])
    port = await first.start("127.0.0.1:0")
    with pytest.raises(UnavailableError, match="cannot listen at"):
        await Server([]).start(f"127.0.0.1:{port}")
    await first.stop(grace_s=0)


def test_a_status_code_has_a_readable_name() -> None:
    assert status_code_name(3) == "INVALID_ARGUMENT"
    # As a peer may send it.
    assert status_code_name(-5) == "code -5"


STATUS = (grpc.StatusCode.INVALID_ARGUMENT, "event: is not set")


class FailingVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Fails while its answers are on their way."""

    async def Verify(  # noqa: N802 - the name is gRPC's
        self,
        request_iterator: AsyncIterator[verifier_pb2.VerifyRequest],
        context: grpc.aio.ServicerContext[verifier_pb2.VerifyRequest, verifier_pb2.VerifyResponse],
    ) -> None:
        async with conversing(context):
            writer = MessageWriter(context.write, lambda: None)
            async for request in request_iterator:
                for _ in range(request.sequence_id):
                    writer.send(verifier_pb2.VerifyResponse())
                await writer.close()
                raise InvalidRequestError("event", "is not set")


@pytest.mark.parametrize("num_answers", [0, 1, 3])
async def test_a_stream_ends_at_once_while_its_first_answers_are_on_their_way(
    num_answers: int, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(["coppice.v1.VerifierService"])
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(FailingVerifier(), server.grpc)
    port = await server.start("127.0.0.1:0")
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call = verifier_pb2_grpc.VerifierServiceStub(channel).Verify(timeout=10)
        await call.write(verifier_pb2.VerifyRequest(sequence_id=num_answers))
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        assert (await call.code(), await call.details()) == STATUS
    await server.stop(grace_s=0)
    assert not caplog.records
