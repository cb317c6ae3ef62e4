"""The fault proxy does to bytes what it was told, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.faults.proxy import CLEAN, FaultProxy, Greeting, Link
from tests.stream_server import stream_server

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
MESSAGE = bytes(range(256)) * 40


@contextlib.asynccontextmanager
async def echo() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that sends back what it gets, and what it got."""
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                heard.append(data)
                writer.write(data)
                await writer.drain()

    async with stream_server(answer) as address:
        yield address, heard


@contextlib.asynccontextmanager
async def proxied(seed: int = 0) -> AsyncIterator[tuple[FaultProxy, list[bytes]]]:
    async with echo() as (address, heard), FaultProxy(address, seed).running() as proxy:
        yield proxy, heard


@contextlib.asynccontextmanager
async def connected(proxy: FaultProxy) -> AsyncIterator[Ends]:
    host, _, port = proxy.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def exchange(ends: Ends, message: bytes = MESSAGE, timeout_s: float = 5.0) -> bytes:
    reader, writer = ends
    writer.write(message)
    async with asyncio.timeout(timeout_s):
        return await reader.readexactly(len(message))


async def test_a_clean_link_passes_everything_and_its_end() -> None:
    async with proxied() as (proxy, heard):
        async with connected(proxy) as (reader, writer):
            assert await exchange((reader, writer)) == MESSAGE
            writer.write_eof()
            assert await reader.read() == b""
        assert b"".join(heard) == MESSAGE
        async with asyncio.timeout(5):
            while proxy.num_open:  # noqa: ASYNC110 nothing to wait on
                await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("up", "down", "least_s"),
    [
        (Link(delay_s=0.05), CLEAN, 0.05),
        (Link(delay_s=0.03), Link(delay_s=0.04), 0.07),
        (CLEAN, Link(bytes_per_s=len(MESSAGE) / 0.06), 0.06),
    ],
    ids=["delay", "delay both ways", "bandwidth"],
)
async def test_a_slow_link_takes_its_time_and_changes_nothing(up: Link, down: Link, least_s: float) -> None:
    async with proxied() as (proxy, _), connected(proxy) as ends:
        proxy.shape(up, down)
        started = time.perf_counter()
        assert await exchange(ends) == MESSAGE
        assert time.perf_counter() - started >= least_s


async def test_a_delay_is_one_of_each_byte_and_not_of_each_chunk() -> None:
    """Ten chunks sent together arrive together: latency takes no bandwidth."""
    async with proxied() as (proxy, heard), connected(proxy) as (reader, writer):
        proxy.shape(up=Link(delay_s=0.2))
        started = time.perf_counter()
        for _ in range(10):
            writer.write(MESSAGE)
            await asyncio.sleep(0.005)
        await reader.readexactly(10 * len(MESSAGE))
        assert len(heard) > 1
        assert 0.2 <= time.perf_counter() - started < 1.0


async def test_jitter_keeps_the_order_and_its_seed_gives_it_again() -> None:
    async with proxied() as (proxy, _), connected(proxy) as (reader, writer):
        proxy.shape(up=Link(jitter_s=0.02), down=Link(jitter_s=0.02))
        sent = b"".join(bytes([number]) * 100 for number in range(40))
        for at in range(0, len(sent), 100):
            writer.write(sent[at : at + 100])
            await asyncio.sleep(0.001)
        assert await reader.readexactly(len(sent)) == sent
    assert FaultProxy("h:1", 7).chance.random() == FaultProxy("h:1", 7).chance.random()


async def test_what_was_stalled_arrives_in_order_afterwards() -> None:
    async with proxied() as (proxy, heard), connected(proxy) as ends:
        assert await exchange(ends, b"before") == b"before"
        proxy.shape(up=Link(stalled=True))
        with pytest.raises(TimeoutError):
            await exchange(ends, b"while", timeout_s=0.1)
        ends[1].write(b" stalled")
        assert heard == [b"before"]
        proxy.shape()
        async with asyncio.timeout(5):
            assert await ends[0].readexactly(13) == b"while stalled"


async def test_a_cut_resets_both_ends_and_new_connections_pass() -> None:
    async with proxied() as (proxy, _):
        async with connected(proxy) as ends:
            await exchange(ends)
            proxy.cut()
            with pytest.raises(ConnectionError):
                await exchange(ends)
        async with connected(proxy) as ends:
            assert await exchange(ends) == MESSAGE


async def test_half_open_connections_swallow_and_stay_silent() -> None:
    async with proxied() as (proxy, heard):
        async with connected(proxy) as ends:
            await exchange(ends)
            num_heard = len(heard)
            proxy.half_open()
            with pytest.raises(TimeoutError):
                await exchange(ends, timeout_s=0.1)
            ends[1].write(MESSAGE)
            await ends[1].drain()
            assert len(heard) == num_heard
            assert proxy.num_open == 1
        async with connected(proxy) as ends:
            assert await exchange(ends) == MESSAGE


async def test_flips_change_one_byte_of_each_chunk() -> None:
    async with proxied(seed=3) as (proxy, _), connected(proxy) as ends:
        proxy.shape(down=Link(flip_probability=1.0))
        assert sum(a != b for a, b in zip(await exchange(ends, b"x" * 100), b"x" * 100, strict=True)) == 1


@pytest.mark.parametrize("greeting", [Greeting.REFUSE, Greeting.GARBAGE])
async def test_new_connections_are_greeted_as_told(greeting: Greeting) -> None:
    async with proxied() as (proxy, heard):
        proxy.greeting = greeting
        async with connected(proxy) as (reader, writer):
            answer = b""
            with contextlib.suppress(ConnectionError):
                answer = await reader.read(10_000)
                await exchange((reader, writer))
            assert MESSAGE not in answer
            assert bool(answer) == bool(heard) == (greeting is Greeting.GARBAGE)
        proxy.greeting = Greeting.PASS
        async with connected(proxy) as ends:
            assert await exchange(ends) == MESSAGE


async def test_a_target_that_is_not_there_resets_the_caller() -> None:
    async with echo() as (address, _):
        pass
    async with FaultProxy(address).running() as proxy, connected(proxy) as ends:
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await exchange(ends)


@pytest.mark.parametrize(
    "fields", [{"delay_s": -1.0}, {"jitter_s": float("nan")}, {"bytes_per_s": 0.0}, {"flip_probability": 1.5}]
)
def test_a_link_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Link(**fields)


async def test_closing_waits_for_nothing_that_is_stuck() -> None:
    async with asyncio.timeout(5):
        async with proxied() as (proxy, _), connected(proxy) as (_, writer):
            proxy.shape(up=Link(stalled=True))
            # More than waits in a direction's queue.
            writer.write(bytes(64 * 1024 * 1024))
            await asyncio.sleep(0.3)
