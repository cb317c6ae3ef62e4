"""Every kind of fault: what it needs, what it does for how long, and how it is undone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from coppice.client import Client, Options, RequestFailedError
from coppice.net.rpc import MAX_MESSAGE_BYTES, open_channel
from coppice.v1 import inference_pb2
from tests.faults.deployment import Deployment
from tests.faults.messages import mangled_bytes, valid_message
from tests.faults.proxy import Greeting, Link

HOPS = ("client", "gateway", "verifier 1", "verifier 2", "drafter 1", "drafter 2", "redis")
# Hops where any byte may be another one: what crosses them is a hint, or signed. Elsewhere a changed byte can be a
# changed token, and only TLS could tell; there, garbage comes instead of a connection.
HINTS = ("drafter 1", "drafter 2", "redis")
SERVICES = ("verifier 1", "verifier 2", "drafter 1", "drafter 2")
GENERATE = f"/{inference_pb2.DESCRIPTOR.services_by_name['InferenceService'].full_name}/Generate"
STORM, FLOOD = 30, 60
SILENCES_S = (1.0, 10.0)
STOPS_S = (1.0, 10.0, 60.0)
# What a server may answer to bytes that are no message: it is the caller's mistake, or the connection is gone.
_ANSWERS_TO_GARBAGE = frozenset({"INVALID_ARGUMENT", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "OK"})
_CLIENTS_TIMEOUT_S = 20.0


class RefusedWronglyError(AssertionError):
    """A client's mistake was answered as no client's mistake is."""


@dataclass(frozen=True)
class Fault:
    """One fault of a kind at a target, which lasts for `duration_s` where it can last."""

    kind: str
    target: str
    duration_s: float
    chance: random.Random

    async def inject(self, deployment: Deployment) -> None:
        """Do it and undo it; what needs time to come back is back then."""
        await KINDS[self.kind].act(self, deployment)


@dataclass(frozen=True)
class Kind:
    """How often of how many, where, and whether that needs processes of its own."""

    weight: float
    targets: tuple[str, ...]
    act: Callable[[Fault, Deployment], Awaitable[None]]
    needs_processes: bool = False


def shaped(make: Callable[[random.Random], Link]) -> Callable[[Fault, Deployment], Awaitable[None]]:
    """A link of a certain kind, in one direction or both."""

    async def act(fault: Fault, deployment: Deployment) -> None:
        proxy = deployment.proxies[fault.target]
        bad = make(fault.chance)
        way = fault.chance.randrange(3)
        proxy.shape(bad if way != 1 else Link(), bad if way != 0 else Link())
        await asyncio.sleep(fault.duration_s)
        proxy.shape()

    return act


async def partitioned(fault: Fault, deployment: Deployment) -> None:
    """One direction is silent for 1 or 10 seconds, while the other one goes on; nobody is told."""
    proxy = deployment.proxies[fault.target]
    bad = (Link(stalled=True), Link())
    proxy.shape(*(bad if fault.chance.random() < 0.5 else bad[::-1]))
    await asyncio.sleep(fault.chance.choice(SILENCES_S))
    proxy.shape()


async def flipped(fault: Fault, deployment: Deployment) -> None:
    """Bytes change; what came of that is over with the connections."""
    proxy = deployment.proxies[fault.target]
    proxy.shape(Link(flip_probability=0.2), Link(flip_probability=0.2))
    await asyncio.sleep(fault.duration_s)
    proxy.shape()
    proxy.cut()


async def cut(fault: Fault, deployment: Deployment) -> None:
    """Every connection is reset."""
    deployment.proxies[fault.target].cut()


async def half_open(fault: Fault, deployment: Deployment) -> None:
    """Connections lead to nobody, until somebody finds out."""
    proxy = deployment.proxies[fault.target]
    proxy.half_open()
    await asyncio.sleep(fault.duration_s)
    proxy.cut()


def greeted(greeting: Greeting) -> Callable[[Fault, Deployment], Awaitable[None]]:
    """Connections are reset, and for a while so are new ones, or they talk nonsense."""

    async def act(fault: Fault, deployment: Deployment) -> None:
        proxy = deployment.proxies[fault.target]
        proxy.greeting = greeting
        proxy.cut()
        await asyncio.sleep(fault.duration_s)
        proxy.greeting = Greeting.PASS

    return act


async def lost(fault: Fault, deployment: Deployment) -> None:
    """Connections lead to nobody, and nothing but the services' own keepalive finds out."""
    deployment.proxies[fault.target].half_open()


async def killed(fault: Fault, deployment: Deployment) -> None:
    """A process dies and is started again."""
    service = deployment.services[fault.target]
    await service.kill()
    await service.start()


async def stopped(fault: Fault, deployment: Deployment) -> None:
    """A process stands still for a while."""
    service = deployment.services[fault.target]
    service.send(signal.SIGSTOP)
    await asyncio.sleep(fault.duration_s)
    service.send(signal.SIGCONT)


async def stopped_for_long(fault: Fault, deployment: Deployment) -> None:
    """A process stands still for 1, 10 or 60 seconds, which keepalive notices or not."""
    service = deployment.services[fault.target]
    service.send(signal.SIGSTOP)
    await asyncio.sleep(fault.chance.choice(STOPS_S))
    service.send(signal.SIGCONT)


async def redis_killed(fault: Fault, deployment: Deployment) -> None:
    """Redis dies, and is back a little later without what it held."""
    assert deployment.redis is not None
    await deployment.redis.kill()
    await asyncio.sleep(fault.duration_s)
    await deployment.redis.start()


async def redis_full(fault: Fault, deployment: Deployment) -> None:
    """Redis takes nothing any more for a while."""
    assert deployment.redis is not None
    async with deployment.redis.client() as client:
        await client.config_set("maxmemory", "1")
        await asyncio.sleep(fault.duration_s)
        await client.config_set("maxmemory", "0")


async def redis_read_only(fault: Fault, deployment: Deployment) -> None:
    """Redis is a replica without a master for a while: it answers, and takes nothing."""
    assert deployment.redis is not None
    async with deployment.redis.client() as client:
        await client.replicaof("127.0.0.1", 1)
        await asyncio.sleep(fault.duration_s)
        await client.replicaof("NO", "ONE")


async def redis_locked(fault: Fault, deployment: Deployment) -> None:
    """Redis wants a password that no client has, for a while, of connections that begin; the others are cut."""
    assert deployment.redis is not None
    async with deployment.redis.client() as client:
        await client.config_set("requirepass", "another")
        await client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await asyncio.sleep(fault.duration_s)
        await client.config_set("requirepass", "")


async def redis_slow(fault: Fault, deployment: Deployment) -> None:
    """Redis answers no client for a while, and then all."""
    assert deployment.redis is not None
    async with deployment.redis.client() as client:
        await client.execute_command("CLIENT", "PAUSE", max(1, round(fault.duration_s * 1000)), "ALL")
        await asyncio.sleep(fault.duration_s)


async def redis_wrong_type(fault: Fault, deployment: Deployment) -> None:
    """Where values are, there are lists all of a sudden."""
    assert deployment.redis is not None
    async with deployment.redis.client() as client:
        for key in (await client.keys("*"))[:50]:
            await client.delete(key)
            await client.rpush(key, "no value of ours")


async def cancel_storm(fault: Fault, deployment: Deployment) -> None:
    """Many requests at once whose clients leave at once."""
    async with Client(deployment.address, tenant="storm") as client:
        calls = [
            asyncio.create_task(client.generate((98, 99, 100), Options(max_tokens=100), timeout_s=_CLIENTS_TIMEOUT_S))
            for _ in range(STORM)
        ]
        await asyncio.sleep(fault.chance.uniform(0, 0.1))
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def connection_flood(fault: Fault, deployment: Deployment) -> None:
    """Many connections at once that say nothing, or nonsense."""
    host, _, port = deployment.address.rpartition(":")
    writers = []
    for number in range(FLOOD):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host, int(port))
            writers.append(writer)
            if number % 2:
                writer.write(fault.chance.randbytes(100))
    await asyncio.sleep(0.05)
    for writer in writers:
        writer.transport.abort()


async def oversized(fault: Fault, deployment: Deployment) -> None:
    """One message that is larger than any may be."""
    await _send(deployment, bytes(MAX_MESSAGE_BYTES + 1))


async def malformed(fault: Fault, deployment: Deployment) -> None:
    """Bytes that are no message, or hardly one."""
    valid = valid_message(inference_pb2.GenerateRequest, fault.chance)
    await _send(deployment, mangled_bytes(valid.SerializeToString(), fault.chance) + b"\xff")


async def invalid(fault: Fault, deployment: Deployment) -> None:
    """A request that breaks a limit."""
    async with Client(deployment.address) as client:
        try:
            await client.generate((98,), Options(temperature=-1.0), timeout_s=_CLIENTS_TIMEOUT_S)
        except RequestFailedError as error:
            if error.code.name not in _ANSWERS_TO_GARBAGE | {"DEADLINE_EXCEEDED"}:
                raise RefusedWronglyError(str(error)) from error
        else:
            raise RefusedWronglyError("a negative temperature was accepted")


async def _send(deployment: Deployment, data: bytes) -> None:
    async with open_channel(deployment.address) as channel:
        generate: Any = channel.unary_stream(GENERATE, request_serializer=None, response_deserializer=None)
        call = generate(data, timeout=_CLIENTS_TIMEOUT_S)
        try:
            async for _ in call:
                break
        except grpc.aio.AioRpcError as error:
            if error.code().name not in _ANSWERS_TO_GARBAGE | {"DEADLINE_EXCEEDED", "UNIMPLEMENTED"}:
                raise RefusedWronglyError(f"{error.code().name}: {error.details()}") from error
        finally:
            call.cancel()


KINDS = {
    "delay": Kind(12, HOPS, shaped(lambda chance: Link(delay_s=chance.uniform(0.01, 0.2)))),
    "jitter": Kind(12, HOPS, shaped(lambda chance: Link(jitter_s=chance.uniform(0.01, 0.2)))),
    "narrow": Kind(8, HOPS, shaped(lambda chance: Link(bytes_per_s=chance.uniform(2_000, 50_000)))),
    "drop": Kind(12, HOPS, shaped(lambda chance: Link(stalled=True))),
    "partition": Kind(0.5, HOPS, partitioned),
    "cut": Kind(14, HOPS, cut),
    "half-open": Kind(8, HOPS, half_open),
    "refuse": Kind(6, HOPS, greeted(Greeting.REFUSE)),
    "garbage": Kind(6, HOPS, greeted(Greeting.GARBAGE)),
    "flip": Kind(8, HINTS, flipped),
    "invalid": Kind(3, ("client",), invalid),
    "malformed": Kind(4, ("client",), malformed),
    "oversized": Kind(0.3, ("client",), oversized),
    "cancel storm": Kind(3, ("client",), cancel_storm),
    "flood": Kind(3, ("client",), connection_flood),
    "lost": Kind(0.5, SERVICES, lost, needs_processes=True),
    "kill": Kind(2, (*SERVICES, "gateway"), killed, needs_processes=True),
    "stop": Kind(4, (*SERVICES, "orchestrator", "gateway"), stopped, needs_processes=True),
    "stop long": Kind(0.3, ("verifier 1", "verifier 2"), stopped_for_long, needs_processes=True),
    "kill Redis": Kind(1, ("redis",), redis_killed, needs_processes=True),
    "full Redis": Kind(2, ("redis",), redis_full, needs_processes=True),
    "read-only Redis": Kind(2, ("redis",), redis_read_only, needs_processes=True),
    "locked Redis": Kind(2, ("redis",), redis_locked, needs_processes=True),
    "slow Redis": Kind(2, ("redis",), redis_slow, needs_processes=True),
    "wrong type": Kind(2, ("redis",), redis_wrong_type, needs_processes=True),
}
