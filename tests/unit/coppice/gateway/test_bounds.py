"""What bounds a stranger at the gateway's door: places of connections, room for bodies, errors of long lists."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest

from coppice.gateway.body_room import SMALL_BYTES, BodyRoom
from coppice.gateway.config import GatewayConfig
from coppice.gateway.counts import GatewayCounts
from coppice.gateway.errors import ApiError
from coppice.gateway.exchange import HttpExchange
from coppice.gateway.fields import CompletionFields, TokenizeFields, parse
from coppice.gateway.generation import Completions
from coppice.gateway.http_server import OpenConnections, serving
from coppice.gateway.tokens import Tokenize
from coppice.gateway.upstream import ServedModel
from coppice.net.guard.turnstile import Turnstile
from coppice.v1 import inference_pb2
from tests.http_client import post


class FakeConnection:
    """A connection as `OpenConnections` sees it."""

    def __init__(self, *, is_idle: bool = True, age_s: float = 9.0) -> None:
        self.is_idle = is_idle
        self.age_s = age_s
        self.transport = self
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


def filled(connections: OpenConnections, host: str, some: list[Any]) -> None:
    for one in some:
        assert connections.has_place(host)
        connections.add(one, host)


def test_a_host_has_its_share_of_places_and_the_oldest_idle_one_makes_room() -> None:
    connections = OpenConnections(8)
    own = [FakeConnection(is_idle=number != 0) for number in range(6)]
    filled(connections, "a", own)
    assert connections.has_place("a")
    assert [one.is_aborted for one in own] == [False, True, False, False, False, False]
    filled(connections, "a", [FakeConnection()])
    # Others still have places, two without anybody losing one.
    filled(connections, "b", [FakeConnection(), FakeConnection()])
    assert sum(one.is_aborted for one in own) == 1
    # All places are taken: that of the host with most.
    assert connections.has_place("c")
    assert [one.is_aborted for one in own] == [False, True, True, False, False, False]


def test_a_flood_is_refused_and_what_serves_requests_stays() -> None:
    young = OpenConnections(8)
    flood = [FakeConnection(age_s=0.1) for _ in range(6)]
    filled(young, "a", flood)
    assert not young.has_place("a")
    busy = OpenConnections(8)
    streams = [FakeConnection(is_idle=False) for _ in range(6)]
    filled(busy, "a", streams)
    assert not busy.has_place("a")
    assert not any(one.is_aborted for one in (*flood, *streams))
    busy.remove(streams[0])  # type: ignore[arg-type]
    assert busy.has_place("a")


async def test_large_bodies_wait_for_room_and_the_host_that_holds_least_is_next() -> None:
    room, order = BodyRoom(10 * SMALL_BYTES), list[str]()
    go_on = {name: asyncio.Event() for name in ("a1", "a2", "a3", "a4", "b1")}

    async def read(name: str) -> None:
        async with room.hold(4 * SMALL_BYTES, name[0]):
            order.append(name)
            await go_on[name].wait()

    running = {}
    for name in go_on:
        running[name] = asyncio.create_task(read(name))
        await asyncio.sleep(0)
    async with room.hold(SMALL_BYTES, "a"):
        order.append("small")
    assert order == ["a1", "a2", "small"]
    # One that leaves while it waits is left out.
    running["a3"].cancel()
    for name in ("a1", "b1", "a2", "a4"):
        go_on[name].set()
        await asyncio.wait({running[name]}, timeout=5)
    assert order == ["a1", "a2", "small", "b1", "a4"]


@pytest.mark.parametrize(
    "fields",
    [{"prompt": [None] * 5000}, {"prompt": "a", "stop": [1] * 5000}, {f"k{number}": 1 for number in range(5000)}],
    ids=["prompts", "stop strings", "fields"],
)
def test_a_long_list_of_mistakes_is_one_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        parse(json.dumps({"model": "toy", **fields}).encode(), CompletionFields)
    assert refused.value.status == 400
    assert len(json.dumps(refused.value.body())) < 300


async def test_a_client_that_has_sent_several_requests_and_leaves_is_noticed_by_the_one_being_answered() -> None:
    config = GatewayConfig(listen_address="127.0.0.1:0", orchestrator_address="127.0.0.1:1")
    begun, left = asyncio.Event(), asyncio.Event()
    paths = []

    async def app(scope: Any, receive: Any, _: Any) -> None:
        paths.append(scope["path"])
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async with asyncio.timeout(10.0), serving(app, config, None) as address:
        host, _, port = address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"".join(b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % number for number in range(3)))
        await begun.wait()
        await asyncio.sleep(0.05)
        assert not left.is_set()
        writer.close()
        await left.wait()
        await asyncio.sleep(0.05)
    # The others are not begun for nobody.
    assert paths == ["/0"]


@pytest.mark.parametrize("size", [7, 10_000])
@pytest.mark.parametrize("offer", [b"h2c", b"websocket"])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_an_offered_upgrade_is_ignored(offer: bytes, size: int, is_chunked: bool) -> None:
    config = GatewayConfig(listen_address="127.0.0.1:0", orchestrator_address="127.0.0.1:1")
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, is_more = b"", True
        while is_more:
            event = await receive()
            body, is_more = body + event["body"], event["more_body"]
        seen.append((scope["path"], scope["query_string"], body, dict(scope["headers"])[b"x-more"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    body = b"b" * size
    framing = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % size
    head = b"POST /a?q=1 HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    head += b"Upgrade: %b\r\n%b\r\nX-More: m\r\n\r\n"
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (size, body) if is_chunked else body
    # Two on one connection: the second follows the first one's body.
    async with asyncio.timeout(10.0), serving(app, config, None) as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write((head % (offer, framing) + sent) * 2)
        for _ in range(2):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()
    assert seen == [("/a", b"q=1", body, b"m")] * 2


class WaitingUpstream:
    """An orchestrator that takes calls and answers none."""

    def __init__(self) -> None:
        self.connections: list[str] = []
        self.is_called = asyncio.Event()

    async def model_named(self, name: str, metadata: Any) -> ServedModel:
        return ServedModel(name, inference_pb2.GetModelInfoResponse())

    def generate(self, *parts: Any) -> Any:
        self.connections.append(parts[-1])
        self.is_called.set()
        return WaitingCall()


class WaitingCall:
    """A call without an answer, until it is cancelled."""

    def __init__(self) -> None:
        self._end = asyncio.Event()

    def cancel(self) -> None:
        self._end.set()

    async def __aiter__(self) -> AsyncIterator[Any]:
        await self._end.wait()
        raise asyncio.CancelledError
        yield


class KeptCompletions(Completions):
    """Remembers the fields of the latest body weakly."""

    latest: weakref.ref[Any]

    async def _fields(self, exchange: Any) -> Any:
        fields = await super()._fields(exchange)
        self.latest = weakref.ref(fields)
        return fields


async def test_a_body_is_dropped_while_its_calls_wait_and_each_of_them_is_charged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = GatewayConfig(listen_address="127.0.0.1:0", orchestrator_address="127.0.0.1:1")
    upstream, charged = WaitingUpstream(), list[float]()
    endpoint = KeptCompletions(upstream, config, GatewayCounts(), BodyRoom())  # type: ignore[arg-type]
    monkeypatch.setattr(Turnstile, "charge", lambda _, __, units: charged.append(units))
    body = json.dumps({"model": "toy", "prompt": ["a"] * 64, "guided_regex": "a" * 10240}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    async with asyncio.timeout(10.0), serving(endpoint, config, None) as address:
        host, _, port = address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head % len(body) + body)
        await upstream.is_called.wait()
        await asyncio.sleep(0.05)
        gc.collect()
        assert endpoint.latest() is None
        name, own_port = writer.get_extra_info("sockname")
        assert upstream.connections == [f"{name}:{own_port}"] * 64
        # Reading, the first call, and 63 more.
        assert sorted(charged)[-2:] == [5, 63]
        writer.close()


async def test_a_request_for_which_there_is_no_memory_is_refused_and_the_next_is_served() -> None:
    config = GatewayConfig(listen_address="127.0.0.1:0", orchestrator_address="127.0.0.1:1", grace_s=0.0)

    class Echo(Tokenize):
        """Answers with the prompt, unless it takes too much memory."""

        async def respond(self, exchange: HttpExchange, fields: TokenizeFields, identity: str) -> None:
            if fields.prompt == "large":
                raise MemoryError
            await exchange.answer(200, fields.prompt)

    endpoint = Echo(WaitingUpstream(), config, GatewayCounts(), BodyRoom())  # type: ignore[arg-type]
    async with asyncio.timeout(10.0), serving(endpoint, config, None) as address:
        refused = await post(address, "/tokenize", {"prompt": "large"})
        served = await post(address, "/tokenize", {"prompt": "small"})
    assert (refused.status, refused.error["code"]) == (503, "unavailable")
    assert (served.status, served.content) == (200, "small")
