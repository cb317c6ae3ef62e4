"""Real handshakes over loopback: who is served, who is refused, and what happens while certificates change."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coppice.client import Client, RequestFailedError
from coppice.net.certificates import Certificates
from coppice.net.rpc import LIVENESS, Server, open_channel
from coppice.net.tls import ChannelTls, ServerTls
from coppice.v1 import inference_pb2, inference_pb2_grpc
from tests.certificates import HOST, Directory, directory, issue

SERVICE = "coppice.v1.InferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(tmp_path: Path, authority: trustme.CA) -> Directory:
    return directory(tmp_path / "tls", authority)


@pytest.fixture
def strangers(tmp_path: Path) -> Directory:
    """Of an authority that nobody here knows."""
    return directory(tmp_path / "strangers", trustme.CA())


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    async def GetModelInfo(  # noqa: N802 - the name is gRPC's
        self,
        request: inference_pb2.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[inference_pb2.GetModelInfoRequest, inference_pb2.GetModelInfoResponse],
    ) -> inference_pb2.GetModelInfoResponse:
        return inference_pb2.GetModelInfoResponse(model="secured")


@contextlib.asynccontextmanager
async def serving(tls: ServerTls | None, health_port: int = 0) -> AsyncIterator[str]:
    server = Server([SERVICE], None if tls is None else Certificates(tls))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Inference(), server.grpc)
    port = await server.start(f"{HOST}:0", health_port)
    await server.set_serving(True)
    try:
        yield f"{HOST}:{port}"
    finally:
        await server.stop(0)


async def model(address: str, tls: ChannelTls | None) -> str:
    async with Client(address, tls=tls) as client:
        return (await client.model_info(timeout_s=10)).model


async def refusal(address: str, tls: ChannelTls | None) -> RequestFailedError:
    with pytest.raises(RequestFailedError) as caught:
        await model(address, tls)
    return caught.value


def health(channel: grpc.aio.Channel) -> health_pb2_grpc.HealthStub:
    return health_pb2_grpc.HealthStub(channel)


async def test_a_caller_that_trusts_the_server_is_served(files: Directory) -> None:
    async with serving(files.one_sided()) as address:
        assert await model(address, files.anonymous()) == "secured"
        assert await model(address, files.caller()) == "secured"


async def test_who_shows_a_certificate_is_served_where_one_is_asked_for(files: Directory) -> None:
    async with serving(files.mutual()) as address:
        assert await model(address, files.caller()) == "secured"


async def test_a_plaintext_caller_is_refused(files: Directory) -> None:
    for tls in (files.one_sided(), files.mutual()):
        async with serving(tls) as address:
            assert (await refusal(address, None)).code == grpc.StatusCode.UNAVAILABLE


async def test_a_caller_without_a_certificate_is_refused_where_one_is_asked_for(files: Directory) -> None:
    async with serving(files.mutual()) as address:
        error = await refusal(address, files.anonymous())
        assert error.code == grpc.StatusCode.UNAVAILABLE
        assert error.details


async def test_a_certificate_of_an_unknown_authority_is_refused(files: Directory, strangers: Directory) -> None:
    async with serving(files.mutual()) as address:
        known_server = ChannelTls(files.ca, strangers.cert, strangers.key)
        assert (await refusal(address, known_server)).code == grpc.StatusCode.UNAVAILABLE


async def test_a_server_of_an_unknown_authority_is_not_spoken_to(files: Directory, strangers: Directory) -> None:
    async with serving(files.one_sided()) as address:
        for tls in (strangers.anonymous(), ChannelTls()):
            error = await refusal(address, tls)
            assert error.code == grpc.StatusCode.UNAVAILABLE
            assert "CERTIFICATE_VERIFY_FAILED" in error.details


async def test_what_a_refused_caller_reads_names_no_file(files: Directory, strangers: Directory) -> None:
    async with serving(files.mutual()) as address:
        callers = [None, files.anonymous(), strangers.anonymous(), ChannelTls(files.ca, strangers.cert, strangers.key)]
        for tls in callers:
            text = str(await refusal(address, tls))
            assert str(files.path.parent) not in text
            assert ".pem" not in text


async def test_a_caller_with_tls_is_told_that_a_plaintext_server_has_none(files: Directory) -> None:
    async with serving(None) as address:
        assert (await refusal(address, files.caller())).code == grpc.StatusCode.UNAVAILABLE


async def test_the_name_in_the_certificate_counts(tmp_path: Path, authority: trustme.CA) -> None:
    named = directory(tmp_path / "named", authority, "verifier.example")
    async with serving(named.one_sided()) as address:
        assert (await refusal(address, named.anonymous())).code == grpc.StatusCode.UNAVAILABLE
        assert await model(address, ChannelTls(named.ca, name="verifier.example")) == "secured"
        wrong = ChannelTls(named.ca, name="drafter.example")
        assert (await refusal(address, wrong)).code == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(("when", "text"), [("expired", "has expired"), ("early", "is not yet valid")])
async def test_a_server_s_certificate_that_is_not_valid_now_is_refused(
    tmp_path: Path, authority: trustme.CA, when: str, text: str
) -> None:
    invalid = directory(tmp_path / when, authority, **{when: True})
    _, key, cert = invalid.contents()
    # gRPC's own, since ours would not start with such a certificate.
    server = grpc.aio.server()
    port = server.add_secure_port(f"{HOST}:0", grpc.ssl_server_credentials([(key, cert)]))
    await server.start()
    try:
        error = await refusal(f"{HOST}:{port}", invalid.anonymous())
        assert error.code == grpc.StatusCode.UNAVAILABLE
        assert f"certificate {text}" in error.details
    finally:
        await server.stop(0)


@pytest.mark.parametrize("when", ["expired", "early"])
async def test_a_caller_s_certificate_that_is_not_valid_now_is_refused(
    files: Directory, tmp_path: Path, authority: trustme.CA, when: str
) -> None:
    invalid = directory(tmp_path / when, authority, **{when: True})
    async with (
        serving(files.mutual()) as address,
        grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*invalid.contents())) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def shown(address: str, trusted: Directory) -> int:
    """The serial number of the certificate that a new connection gets, as another implementation of TLS reads it."""
    context = ssl.create_default_context(cafile=trusted.ca)
    context.load_cert_chain(trusted.cert, trusted.key)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    serial = int(writer.get_extra_info("peercert")["serialNumber"], 16)
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()
    return serial


async def test_new_connections_get_a_new_certificate_and_old_streams_live_on(
    files: Directory, tmp_path: Path, authority: trustme.CA
) -> None:
    caller = directory(tmp_path / "caller", authority)
    async with (
        serving(files.mutual()) as address,
        open_channel(address, certificates=Certificates(caller.caller())) as channel,
    ):
        watch = health(channel).Watch(health_pb2.HealthCheckRequest(service=LIVENESS))
        assert (await watch.read()).status == SERVING
        before = await shown(address, caller)
        assert await shown(address, caller) == before

        # Another authority altogether: those who know only the old one are strangers from now on.
        successor = trustme.CA()
        files.swap(issue(successor), successor)
        heir = directory(tmp_path / "heir", successor)
        assert await shown(address, heir) != before
        assert await model(address, heir.caller()) == "secured"
        assert (await refusal(address, caller.caller())).code == grpc.StatusCode.UNAVAILABLE
        # The old connection, and the stream on it.
        answer = await health(channel).Check(health_pb2.HealthCheckRequest(service=LIVENESS), timeout=10)
        assert answer.status == SERVING
        assert not watch.done()


async def test_half_a_change_keeps_the_old_certificate_in_service(
    files: Directory, tmp_path: Path, authority: trustme.CA
) -> None:
    caller = directory(tmp_path / "caller", authority)
    async with serving(files.mutual()) as address:
        before = await shown(address, caller)
        fresh = issue(authority)
        files.overwrite_key(fresh)
        assert await shown(address, caller) == before
        assert await model(address, caller.caller()) == "secured"
        files.overwrite_cert(fresh)
        assert await shown(address, caller) != before


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


async def test_the_health_port_answers_in_plaintext_and_serves_nothing_else(files: Directory) -> None:
    port = free_port()
    async with serving(files.mutual(), port), open_channel(f"{HOST}:{port}") as channel:
        for name in ("", SERVICE, LIVENESS):
            answer = await health(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            assert answer.status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceServiceStub(channel).GetModelInfo(
                inference_pb2.GetModelInfoRequest(), timeout=10
            )
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [answer async for answer in listing]
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_the_health_port_takes_no_large_message(files: Directory) -> None:
    port = free_port()
    async with serving(files.mutual(), port), open_channel(f"{HOST}:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health(channel).Check(health_pb2.HealthCheckRequest(service="x" * 5000), timeout=10)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_health_port_tells_that_the_server_is_not_ready() -> None:
    port = free_port()
    server = Server([SERVICE])
    await server.start(f"{HOST}:0", port)
    async with open_channel(f"{HOST}:{port}") as channel:
        answer = await health(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.stop(0)


async def test_the_health_port_says_not_ready_while_a_call_in_flight_goes_on() -> None:
    port = free_port()
    server = Server([SERVICE])
    begun, may_end = asyncio.Event(), asyncio.Event()

    class SlowService(inference_pb2_grpc.InferenceServiceServicer):
        async def GetModelInfo(self, request: object, context: object) -> inference_pb2.GetModelInfoResponse:  # noqa: N802 - the name is gRPC's
            begun.set()
            await may_end.wait()
            return inference_pb2.GetModelInfoResponse(model="slow")

    inference_pb2_grpc.add_InferenceServiceServicer_to_server(SlowService(), server.grpc)
    address = f"{HOST}:{await server.start(f'{HOST}:0', port)}"
    await server.set_serving(True)
    async with open_channel(address) as channel, open_channel(f"{HOST}:{port}") as probing:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=30)
        answer = asyncio.ensure_future(asyncio.wait_for(call, 30))
        await begun.wait()
        stopping = asyncio.create_task(server.stop(30))
        await asyncio.sleep(0.1)
        found = await health(probing).Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10)
        assert found.status == health_pb2.HealthCheckResponse.NOT_SERVING
        may_end.set()
        assert (await answer).model == "slow"
        await stopping
