"""Replicas behind names that a DNS server answers: new ones, moved ones, and addresses where nobody is."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from coppice.client import Client, Options
from coppice.gateway import upstream as gateway_upstream
from coppice.gateway.app import running as running_gateway
from coppice.gateway.config import GatewayConfig
from orchestrator.app import Orchestrator, running
from orchestrator.config import Config
from orchestrator.peers.peer_channel import RESOLVE_S
from tests.dns_server import DnsServer, Outage, dns_server, getaddrinfo_of
from tests.fakes import FakeDrafter, FakeVerifier, eventually, serving
from tests.faults.deployment import free_port
from tests.http_client import gateway_to, get, post
from tests.toy_target import babble, plain

HERE, ELSEWHERE, NOBODY, SILENCE = "127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"
VERIFIER, OTHER, DRAFTER = "demo-verifier-0.example", "demo-verifier-1.example", "demo-drafter-0.example"


@contextlib.asynccontextmanager
async def orchestrating(dns: DnsServer, ports: dict[str, int], *verifiers: str) -> AsyncIterator[Orchestrator]:
    config = Config(
        verifier_address=",".join(dns.target(name, ports[name]) for name in verifiers),
        drafter_addresses=(dns.target(DRAFTER, ports[DRAFTER]),) if DRAFTER in ports else (),
        connect_timeout_s=15.0,
        grace_s=0.0,
    )
    async with running(config) as orchestrator:
        yield orchestrator


async def answered(orchestrator: Orchestrator) -> float:
    """Seconds that a right answer takes."""
    begun_s = time.monotonic()
    async with Client(orchestrator.address) as client:
        options = Options(max_tokens=20, seed=3, temperature=1.0, ignore_eos=True)
        completion = await client.generate((98, 99), options, timeout_s=20)
    assert list(completion.token_ids) == plain(babble, (98, 99), 20, 3)
    return time.monotonic() - begun_s


async def test_replicas_that_come_later_are_found_under_names_that_were_unknown() -> None:
    ports = {name: free_port() for name in (VERIFIER, OTHER, DRAFTER)}
    async with dns_server() as dns, contextlib.AsyncExitStack() as stack:
        dns.names[VERIFIER] = [HERE]
        await stack.enter_async_context(serving(FakeVerifier(instance_id="0"), f"{HERE}:{ports[VERIFIER]}"))
        orchestrator = await stack.enter_async_context(orchestrating(dns, ports, VERIFIER, OTHER))
        await answered(orchestrator)
        assert orchestrator.verifiers.num_usable == 1
        await stack.enter_async_context(serving(FakeVerifier(instance_id="1"), f"{HERE}:{ports[OTHER]}"))
        await stack.enter_async_context(serving(FakeDrafter(), f"{HERE}:{ports[DRAFTER]}"))
        dns.names |= {OTHER: [HERE], DRAFTER: [HERE]}
        await eventually(lambda: orchestrator.verifiers.num_usable == 2)
        await eventually(lambda: all(client.connected for client in orchestrator.drafters.clients))
        await answered(orchestrator)


async def test_a_replica_that_comes_back_at_another_address_is_found_soon() -> None:
    ports = {VERIFIER: free_port()}
    async with dns_server() as dns:
        dns.names[VERIFIER] = [HERE]
        async with contextlib.AsyncExitStack() as stack:
            old = await stack.enter_async_context(contextlib.AsyncExitStack())
            await old.enter_async_context(serving(FakeVerifier(), f"{HERE}:{ports[VERIFIER]}"))
            orchestrator = await stack.enter_async_context(orchestrating(dns, ports, VERIFIER))
            await answered(orchestrator)
            await old.aclose()
            await eventually(lambda: orchestrator.verifiers.num_usable == 0)
            dns.names[VERIFIER] = [ELSEWHERE]
            await stack.enter_async_context(serving(FakeVerifier(), f"{ELSEWHERE}:{ports[VERIFIER]}"))
            # A channel by itself would not ask for 30 s.
            await eventually(lambda: orchestrator.verifiers.num_usable == 1, timeout_s=25)
            await answered(orchestrator)


@contextlib.contextmanager
def silence(port: int) -> Iterator[None]:
    """An address at which connections are neither accepted nor refused: its queue of them is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((SILENCE, port))
        listener.listen(0)
        for _ in range(3):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex((SILENCE, port))
        yield


@pytest.mark.parametrize("dead", [NOBODY, SILENCE])
async def test_a_dead_address_that_comes_first_delays_little(dead: str) -> None:
    ports = {VERIFIER: free_port(), DRAFTER: free_port()}
    async with dns_server() as dns, contextlib.AsyncExitStack() as stack:
        for port in ports.values() if dead == SILENCE else ():
            stack.enter_context(silence(port))
        dns.names |= {VERIFIER: [dead, HERE], DRAFTER: [dead, HERE]}
        await stack.enter_async_context(serving(FakeVerifier(), f"{HERE}:{ports[VERIFIER]}"))
        await stack.enter_async_context(serving(FakeDrafter(), f"{HERE}:{ports[DRAFTER]}"))
        begun_s = time.monotonic()
        orchestrator = await stack.enter_async_context(orchestrating(dns, ports, VERIFIER))
        await eventually(lambda: all(client.connected for client in orchestrator.drafters.clients))
        assert time.monotonic() - begun_s < 10
        assert await answered(orchestrator) < 10


@pytest.mark.parametrize("outage", Outage)
async def test_while_dns_fails_what_is_known_is_used_and_afterwards_a_changed_address_is_found(outage: Outage) -> None:
    ports = {name: free_port() for name in (VERIFIER, OTHER, DRAFTER)}
    async with dns_server() as dns, contextlib.AsyncExitStack() as stack:
        dns.names |= {name: [HERE] for name in ports}
        moved = await stack.enter_async_context(contextlib.AsyncExitStack())
        await moved.enter_async_context(serving(FakeVerifier(instance_id="0"), f"{HERE}:{ports[VERIFIER]}"))
        await stack.enter_async_context(serving(FakeVerifier(instance_id="1"), f"{HERE}:{ports[OTHER]}"))
        await moved.enter_async_context(serving(FakeDrafter(), f"{HERE}:{ports[DRAFTER]}"))
        orchestrator = await stack.enter_async_context(orchestrating(dns, ports, VERIFIER, OTHER))
        verifiers, [drafter] = orchestrator.verifiers, orchestrator.drafters.clients
        await eventually(lambda: verifiers.num_usable == 2 and drafter.connected)
        dns.outage = outage
        # A channel of this age is opened anew for a peer that is not reached.
        await asyncio.sleep(RESOLVE_S + 0.5)
        assert verifiers.num_usable == 2
        assert drafter.connected
        await answered(orchestrator)
        # Streams that are lost for a moment.
        for peer in (*verifiers.clients, drafter):
            peer.stream.drop()
        await eventually(lambda: verifiers.clients[0].stream.num_lost == drafter.stream.num_lost == 1)
        await eventually(lambda: verifiers.num_usable == 2 and drafter.connected)
        await answered(orchestrator)
        # Others are there now, of which nothing can be known yet.
        await moved.aclose()
        await stack.enter_async_context(serving(FakeVerifier(instance_id="0"), f"{ELSEWHERE}:{ports[VERIFIER]}"))
        await stack.enter_async_context(serving(FakeDrafter(), f"{ELSEWHERE}:{ports[DRAFTER]}"))
        dns.names |= {VERIFIER: [ELSEWHERE], DRAFTER: [ELSEWHERE]}
        await eventually(lambda: verifiers.num_usable == 1 and not drafter.connected)
        for _ in range(3):
            await answered(orchestrator)
        await asyncio.sleep(2 * RESOLVE_S)
        await answered(orchestrator)
        assert verifiers.num_usable == 1
        dns.outage = None
        await eventually(lambda: verifiers.num_usable == 2 and drafter.connected, timeout_s=40)
        await answered(orchestrator)
        assert orchestrator.service.num_requests == 0


@pytest.mark.parametrize("outage", Outage)
async def test_a_gateway_without_dns_answers_soon_and_finds_a_changed_address_afterwards(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, port = "demo-orchestrator.example", free_port()
    fields = {"model": "toy", "prompt": "ab", "max_tokens": 20, "seed": 3, "return_token_ids": True}
    async with dns_server() as dns, contextlib.AsyncExitStack() as stack:
        dns.names[name] = [HERE]
        # Long enough for a channel without a bound of its own to be found out.
        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo_of(dns, 20))
        verifier = await stack.enter_async_context(serving(FakeVerifier()))
        address = await stack.enter_async_context(gateway_to(f"{name}:{port}"))

        async def status() -> int:
            answer = await post(address, "/v1/completions", fields)
            if answer.status == 200:
                assert answer.content["choices"][0]["token_ids"] == plain(babble, [97, 98], 20, 3)
            return answer.status

        async def orchestrated(host: str) -> None:
            async with running(Config(verifier_address=verifier, listen_address=f"{host}:{port}", grace_s=0.0)):
                async with asyncio.timeout(20):
                    # What the gateway asks of the model goes over a connection of its own.
                    while await status() != 200 or (await get(address, "/v1/models")).status != 200:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                dns.outage = outage
                # The connections that there are.
                assert await status() == 200

        await orchestrated(HERE)
        begun_s = time.monotonic()
        asking = [asyncio.create_task(status()) for _ in range(4)]
        # The event loop goes on meanwhile.
        while not all(one.done() for one in asking):
            checked_s = time.monotonic()
            assert (await get(address, "/health")).status == 200
            assert time.monotonic() - checked_s < 2
            await asyncio.sleep(0.1)
        assert [one.result() for one in asking] == [503] * 4
        assert time.monotonic() - begun_s < 12
        dns.outage, dns.names[name] = None, [ELSEWHERE]
        await orchestrated(ELSEWHERE)


@pytest.mark.parametrize("outage", Outage)
async def test_a_gateway_without_dns_asks_for_the_model_over_the_connections_that_are_left(
    outage: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, port = "demo-orchestrator.example", free_port()
    fields = {"prompt": "ab", "max_tokens": 20, "seed": 3, "return_token_ids": True}
    # Each request asks for it.
    monkeypatch.setattr(gateway_upstream, "KNOWN_S", 0.0)
    async with dns_server() as dns, contextlib.AsyncExitStack() as stack:
        dns.names[name] = [HERE]
        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo_of(dns, 20))
        verifier = await stack.enter_async_context(serving(FakeVerifier()))
        settings = Config(verifier_address=verifier, listen_address=f"{HERE}:{port}", grace_s=0.0)
        await stack.enter_async_context(running(settings))
        config = GatewayConfig(listen_address=f"{HERE}:0", orchestrator_address=f"{name}:{port}", grace_s=0.0)
        gateway = await stack.enter_async_context(running_gateway(config))
        quick = gateway.upstream._quick

        async def check(model: str, status: int) -> None:
            answer = await post(gateway.address, "/v1/completions", {**fields, "model": model})
            assert answer.status == status, answer.body
            if status == 200:
                assert answer.content["choices"][0]["token_ids"] == plain(babble, [97, 98], 20, 3)

        await check("toy", 200)
        dns.outage = outage
        assert quick._connection is not None
        quick._connection.close()
        async with asyncio.timeout(RESOLVE_S / 2):
            for _ in range(2):
                await check("toy", 200)
                await check("another", 404)
                for path in ("/ready", "/v1/models"):
                    assert (await get(gateway.address, path)).status == 200
        assert not quick.is_connected
        dns.outage = None

        async def ask() -> None:
            while not quick.is_connected:
                await check("toy", 200)
                await asyncio.sleep(0.1)

        await asyncio.wait_for(ask(), timeout=20)
