"""Connections are taken one per turn of the event loop, and refused ones hold up nobody."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
import sys
from collections.abc import AsyncIterator

import pytest

from coppice.net.listening import accept, listen


@contextlib.asynccontextmanager
async def turns_of(num_clients: int, taken: set[int]) -> AsyncIterator[list[int]]:
    """Turns of the event loop at which connections `taken`, of so many that wait, were taken."""
    [listener] = listen("127.0.0.1:0")
    address = listener.getsockname()
    clients = [socket.create_connection(address) for _ in range(num_clients)]
    turns, number, seen, kept = 0, 0, [], []
    offered = asyncio.Event()

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def takes(client: socket.socket, _: str, __: int) -> bool:
        nonlocal number
        number += 1
        if number == num_clients:
            offered.set()
        if number - 1 in taken:
            seen.append(turns)
            kept.append(client)
            assert client.gettimeout() == 0.0
        return number - 1 in taken

    tasks = [asyncio.create_task(count()), asyncio.create_task(accept(listener, takes))]
    try:
        async with asyncio.timeout(10.0):
            await offered.wait()
        yield seen
        refused = [one for place, one in enumerate(clients) if place not in taken]
        assert [one.recv(1) for one in refused] == [b""] * len(refused)
    finally:
        for task in tasks:
            task.cancel()
        for one in (*clients, *kept, listener):
            one.close()


async def test_refused_connections_do_not_hold_up_a_newcomer() -> None:
    async with turns_of(97, {96}) as [turn]:
        # 96 refusals take six turns, not 96.
        assert turn < 20


async def test_others_work_is_done_after_each_connection_that_is_taken() -> None:
    async with turns_of(4, {0, 1, 2, 3}) as turns:
        assert all(later > earlier for earlier, later in itertools.pairwise(turns))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the state of a connection")
@pytest.mark.parametrize("resets", [False, True], ids=["closed", "reset"])
async def test_connections_that_were_closed_before_their_turn_are_not_offered(*, resets: bool) -> None:
    [listener] = listen("127.0.0.1:0")
    offered: list[bytes] = []
    done = asyncio.Event()

    def takes(client: socket.socket, _: str, __: int) -> bool:
        offered.append(client.recv(16))
        done.set()
        return False

    with listener:
        for number in range(20):
            with socket.create_connection(listener.getsockname()) as client:
                client.sendall(b"leaves %d" % number)
                if resets:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with socket.create_connection(listener.getsockname()) as stays:
            stays.sendall(b"stays")
            task = asyncio.create_task(accept(listener, takes))
            async with asyncio.timeout(10.0):
                await done.wait()
            task.cancel()
    assert offered == [b"stays"]
