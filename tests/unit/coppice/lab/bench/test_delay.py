"""A longer wire passes the same bytes, later."""

from __future__ import annotations

import asyncio
import time

from coppice.lab.bench.forms import delayed
from tests.stream_server import stream_server

MESSAGE = bytes(range(256)) * 40


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()


async def test_bytes_come_back_after_twice_the_delay_whatever_their_number() -> None:
    async with stream_server(_echo) as address, delayed(address, 0.1) as wire:
        host, _, port = wire.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        started = time.perf_counter()
        for _ in range(10):
            writer.write(MESSAGE)
            await asyncio.sleep(0.005)
        assert await reader.readexactly(10 * len(MESSAGE)) == 10 * MESSAGE
        # Ten chunks in a row wait once.
        assert 0.2 <= time.perf_counter() - started < 1.0
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
