"""The whole topology over mTLS, on fakes: the same tokens, also after every certificate has been replaced."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import trustme

from coppice.client import Client, Options, RequestFailedError
from coppice.core.errors import UnavailableError
from coppice.net import rpc
from coppice.net.certificates import Certificates
from coppice.net.loop import channel as loop_channel
from coppice.v1 import verifier_pb2_grpc
from orchestrator.app import Orchestrator, running
from orchestrator.config import Config
from tests.certificates import Directory, directory, issue
from tests.fakes import FakeDrafter, FakeVerifier, eventually, serving
from tests.http_client import gateway_to, head_of, request_bytes
from tests.integration.test_orchestrator_metrics import free_port
from tests.toy_target import babble, plain

PROMPT = [ord(character) for character in "def "]
COUNT = 40
OPTIONS = Options(max_tokens=COUNT, seed=7)
EXPECTED = tuple(plain(babble, PROMPT, COUNT, seed=7))
QUICK = {"connect_timeout_s": 10.0, "grace_s": 0.0, "planner": "fixed", "cache_drafter": False}


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(tmp_path: Path, authority: trustme.CA) -> Directory:
    return directory(tmp_path / "tls", authority)


def secured(files: Directory, verifier: str, *drafters: str, **settings: object) -> Config:
    """An orchestrator with TLS on all sides."""
    tls = {"tls_cert": files.cert, "tls_key": files.key, "tls_client_ca": files.ca}
    backend = {"backend_tls_ca": files.ca, "backend_tls_cert": files.cert, "backend_tls_key": files.key}
    return Config(verifier_address=verifier, drafter_addresses=drafters, **{**QUICK, **tls, **backend, **settings})  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def topology(
    files: Directory, drafter: FakeDrafter, **settings: object
) -> AsyncIterator[tuple[Client, Orchestrator, FakeVerifier]]:
    verifier, certificates = FakeVerifier(), Certificates(files.mutual())
    async with (
        serving(verifier, certificates=certificates) as verifier_address,
        serving(drafter, certificates=certificates) as drafter_address,
        running(secured(files, verifier_address, drafter_address, **settings)) as orchestrator,
        Client(orchestrator.address, tls=files.caller()) as client,
    ):
        yield client, orchestrator, verifier


async def test_the_tokens_are_those_of_plain_decoding(files: Directory) -> None:
    async with topology(files, FakeDrafter()) as (client, orchestrator, _):
        completion = await client.generate(PROMPT, OPTIONS)
        assert completion.token_ids == EXPECTED
        assert completion.speculation.accepted_tokens > 0
        for tls in (None, files.anonymous()):
            async with Client(orchestrator.address, tls=tls) as stranger:
                with pytest.raises(RequestFailedError) as caught:
                    await stranger.generate(PROMPT, OPTIONS, timeout_s=10)
            assert caught.value.code == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("caller", ["plaintext", "another authority"])
async def test_back_ends_do_not_serve_an_orchestrator_that_they_do_not_know(
    files: Directory, tmp_path: Path, caller: str
) -> None:
    strangers = directory(tmp_path / "strangers", trustme.CA())
    async with serving(FakeVerifier(), certificates=Certificates(files.mutual())) as address:
        quick = {"connect_timeout_s": 0.5}
        stranger = {"backend_tls_cert": strangers.cert, "backend_tls_key": strangers.key}
        config = secured(files, address, **{**quick, **stranger})
        if caller == "plaintext":
            config = Config(verifier_address=address, **{**QUICK, **quick})  # type: ignore[arg-type]
        with pytest.raises(UnavailableError, match="UNAVAILABLE"):
            async with running(config):
                raise AssertionError("it serves")


async def test_an_orchestrator_without_tls_in_front_speaks_it_to_back_ends(files: Directory) -> None:
    plain_front = {"tls_cert": "", "tls_key": "", "tls_client_ca": ""}
    async with (
        serving(FakeVerifier(), certificates=Certificates(files.mutual())) as address,
        running(secured(files, address, **plain_front)) as orchestrator,
        Client(orchestrator.address) as client,
    ):
        assert (await client.generate(PROMPT, OPTIONS)).token_ids == EXPECTED


async def test_a_new_authority_is_taken_over_without_a_restart(
    files: Directory, tmp_path: Path, authority: trustme.CA
) -> None:
    async with topology(files, FakeDrafter(), resume_s=10.0) as (client, orchestrator, _):
        assert (await client.generate(PROMPT, OPTIONS)).token_ids == EXPECTED
        successor = trustme.CA()
        files.swap(issue(successor), successor)
        # Streams that are open live on with what they began with.
        assert (await client.generate(PROMPT, OPTIONS)).token_ids == EXPECTED
        [verifier], [drafter] = orchestrator.verifiers.clients, orchestrator.drafters.clients
        for peer in (verifier, drafter):
            peer.stream.drop()
        await eventually(lambda: verifier.stream.num_lost == drafter.stream.num_lost == 1)
        await eventually(lambda: verifier.stream.connected and drafter.stream.connected)
        heir = directory(tmp_path / "heir", successor)
        async with Client(orchestrator.address, tls=heir.caller()) as other:
            completion = await other.generate(PROMPT, OPTIONS)
            assert completion.token_ids == EXPECTED
            assert completion.speculation.accepted_tokens > 0
        old = directory(tmp_path / "old", authority)
        async with Client(orchestrator.address, tls=old.caller()) as late:
            with pytest.raises(RequestFailedError):
                await late.generate(PROMPT, OPTIONS, timeout_s=10)


async def test_a_drafter_with_a_certificate_of_another_name_is_done_without(
    files: Directory, tmp_path: Path, authority: trustme.CA
) -> None:
    own = directory(tmp_path / "drafter", authority)
    async with contextlib.AsyncExitStack() as stack:
        verifier = await stack.enter_async_context(serving(FakeVerifier(), certificates=Certificates(files.mutual())))
        drafter = await stack.enter_async_context(contextlib.AsyncExitStack())
        address = await drafter.enter_async_context(serving(FakeDrafter(), certificates=Certificates(own.mutual())))
        orchestrator = await stack.enter_async_context(running(secured(files, verifier, address)))
        client = await stack.enter_async_context(Client(orchestrator.address, tls=files.caller()))
        assert (await client.generate(PROMPT, OPTIONS)).speculation.accepted_tokens > 0
        for names in (["elsewhere"], []):
            await drafter.aclose()
            own.swap(issue(authority, *names), authority)
            again = serving(FakeDrafter(), address, Certificates(own.mutual()))
            await drafter.enter_async_context(again)
            sources = (await client.model_info()).sources
            async with asyncio.timeout(20):
                # Reconnections are at most 5 s apart.
                while ("small-lm" in sources) == bool(names):
                    await asyncio.sleep(0.05)
                    sources = (await client.model_info()).sources
            if names:
                await asyncio.sleep(1.0)
            completion = await client.generate(PROMPT, OPTIONS)
            assert completion.token_ids == EXPECTED
            assert (completion.speculation.accepted_tokens > 0) == (not names)


async def test_back_ends_have_a_name_of_their_own_where_that_is_said(tmp_path: Path, authority: trustme.CA) -> None:
    named = directory(tmp_path / "named", authority, "backend.example")
    async with serving(FakeVerifier(), certificates=Certificates(named.mutual())) as address:
        async with running(secured(named, address, backend_tls_name="backend.example")) as orchestrator:
            assert orchestrator.verifiers.num_usable == 1
        with pytest.raises(UnavailableError):
            async with running(secured(named, address, connect_timeout_s=0.5)):
                raise AssertionError("it serves")


@pytest.mark.parametrize("mode", ["off", "on"])
async def test_metrics_tell_when_both_certificates_end(files: Directory, mode: str) -> None:
    port = free_port()
    scheme = "http" if mode == "off" else "https"
    trusts = None if mode == "off" else ssl.create_default_context(cafile=files.ca)

    def scrape() -> str:
        with urllib.request.urlopen(f"{scheme}://127.0.0.1:{port}/metrics", timeout=10, context=trusts) as answer:
            text: str = answer.read().decode()
        return text

    async with topology(files, FakeDrafter(), metrics_port=port, metrics_tls=mode):
        text = await asyncio.to_thread(scrape)
    for use in ("server", "client"):
        [line] = [one for one in text.splitlines() if f'expiry_timestamp_seconds{{use="{use}"}}' in one]
        assert float(line.split()[1]) == Certificates(files.mutual()).current().not_after_s


async def test_a_certificate_that_is_not_valid_yet_stops_the_start_of_services_and_gateway(
    files: Directory, tmp_path: Path, authority: trustme.CA
) -> None:
    early = directory(tmp_path / "early", authority, early=True)
    text = "CERT would be refused by every peer: .*certificate is not yet valid$"
    for prefix in ("tls", "backend_tls"):
        with pytest.raises(ValueError, match=f"^{prefix.upper()}_{text}"):
            async with running(
                secured(files, "127.0.0.1:1", **{f"{prefix}_cert": early.cert, f"{prefix}_key": early.key})
            ):
                raise AssertionError("it serves")
    for prefix in ("tls", "orchestrator_tls"):
        pair = {f"{prefix}_cert": early.cert, f"{prefix}_key": early.key}
        with pytest.raises(ValueError, match=f"^{prefix.upper()}_{text}"):
            async with gateway_to("127.0.0.1:1", **{"orchestrator_tls_ca": early.ca, **pair}):
                raise AssertionError("it serves")


async def test_a_back_end_s_certificate_that_is_not_valid_yet_is_told(
    files: Directory, tmp_path: Path, authority: trustme.CA
) -> None:
    """The clock of the verifier's host is ahead: it serves with a certificate that the orchestrator refuses."""
    early = directory(tmp_path / "early", authority, early=True)
    _, key, cert = early.contents()
    server = grpc.aio.server()
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(FakeVerifier(), server)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, cert)]))
    await server.start()
    try:
        async with asyncio.timeout(30):
            with pytest.raises(UnavailableError, match="certificate is not yet valid"):
                async with running(secured(files, f"127.0.0.1:{port}", connect_timeout_s=2.0)):
                    raise AssertionError("it serves")
    finally:
        await server.stop(0)


async def test_a_file_that_cannot_be_used_stops_the_start(files: Directory, tmp_path: Path) -> None:
    missing = str(tmp_path / "none.pem")
    for setting in ("tls_cert", "tls_client_ca", "backend_tls_key", "backend_tls_ca"):
        with pytest.raises(ValueError, match=f"^{setting.upper()} cannot be read"):
            async with running(secured(files, "127.0.0.1:1", **{setting: missing})):
                raise AssertionError("it serves")


NUM_CALLERS, NUM_BROWSERS, LONG = 8, 3, 80


async def completed(address: str, files: Directory, seed: int) -> str:
    """A completion over HTTPS on a connection of its own; gives the serial number of the server's certificate."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=files.ca)
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    serial = str(writer.get_extra_info("peercert")["serialNumber"])
    fields = {"model": "toy", "prompt": PROMPT, "max_tokens": LONG, "seed": seed, "return_token_ids": True}
    writer.write(request_bytes("POST", "/v1/completions", json.dumps(fields).encode()))
    status, headers = await head_of(reader)
    body = json.loads(await reader.readexactly(int(headers["content-length"])))
    writer.close()
    assert status == 200
    assert body["choices"][0]["token_ids"] == plain(babble, PROMPT, LONG, seed)
    return serial


async def test_certificates_that_change_under_load_fail_no_request(
    files: Directory, tmp_path: Path, authority: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new certificate, and then a new CA in the steps of `docs/security.md`."""
    # All handshakes are this process's own, and a busy machine takes its time for them.
    patient = ("grpc.min_reconnect_backoff_ms", 30_000)
    monkeypatch.setattr(rpc, "_CHANNEL_OPTIONS", (*rpc._CHANNEL_OPTIONS[:-2], patient, rpc._CHANNEL_OPTIONS[-1]))
    monkeypatch.setattr(loop_channel, "CONNECT_S", 30.0)
    successor, serials, ends = trustme.CA(), set(), Counter[int]()
    steps = [
        (authority, [authority]),
        (authority, [authority, successor]),
        (successor, [authority, successor]),
        (successor, [successor]),
    ]
    # Clients read their files once, and have none that change meanwhile.
    own = directory(tmp_path / "own", authority)
    both = {"tls_cert": files.cert, "tls_key": files.key, "orchestrator_tls_ca": files.ca}
    both |= {"orchestrator_tls_cert": files.cert, "orchestrator_tls_key": files.key}
    is_over = False
    async with (
        topology(files, FakeDrafter(), resume_s=20.0) as (_, orchestrator, verifier),
        gateway_to(orchestrator.address, **both) as address,
    ):

        async def call(number: int) -> None:
            options = Options(max_tokens=LONG, seed=number)
            while not is_over:
                async with Client(orchestrator.address, tls=own.caller()) as one:
                    completion = await one.generate(PROMPT, options, timeout_s=60)
                assert list(completion.token_ids) == plain(babble, PROMPT, LONG, number)
                ends[number] += 1

        async def browse(number: int) -> None:
            while not is_over:
                serials.add(await completed(address, own, number))
                ends[number] += 1

        async def all_served() -> None:
            """Wait until every client has begun and ended a request."""
            before = Counter(ends)
            await eventually(lambda: all(ends[one] >= before[one] + 2 for one in range(len(running))), 60)

        peers = [*orchestrator.verifiers.clients, *orchestrator.drafters.clients]
        async with asyncio.TaskGroup() as clients:
            running = [clients.create_task(call(number)) for number in range(NUM_CALLERS)]
            running += [clients.create_task(browse(NUM_CALLERS + number)) for number in range(NUM_BROWSERS)]
            for count, (issuer, trusted) in enumerate(steps, start=1):
                await all_served()
                await asyncio.to_thread(files.swap, issue(issuer), *trusted)
                own.swap(issue(issuer), *trusted)
                for peer in peers:
                    peer.stream.drop()
                await eventually(lambda count=count: all(one.stream.num_lost == count for one in peers))  # type: ignore[misc]
                await eventually(lambda: all(one.stream.connected for one in peers))
            await all_served()
            is_over = True
        # Each was shown.
        assert len(serials) == 1 + len(steps)
        await eventually(lambda: orchestrator.service.num_requests == 0 and not verifier.active)
