"""Replicas behind names that a DNS server answers: new ones, moved ones, and addresses where nobody is."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from coppice.client import Client, Options
from orchestrator.app import Orchestrator, running
from orchestrator.config import Config
from tests.dns_server import DnsServer, dns_server
from tests.fakes import FakeDrafter, FakeVerifier, eventually, serving
from tests.faults.deployment import free_port
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
