"""A longer wire: a TCP proxy that delays every byte, each way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from coppice.cli.topology import LOCAL

CHUNK_BYTES = 65_536


@contextlib.asynccontextmanager
async def delayed(address: str, delay_s: float) -> AsyncIterator[str]:
    """HOST:PORT of a proxy for `address` whose bytes arrive after a delay, in order; latency takes no bandwidth."""
    host, _, port = address.rpartition(":")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ExceptionGroup), contextlib.closing(writer):
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            with contextlib.closing(far_writer):
                await asyncio.gather(_pass(reader, far_writer, delay_s), _pass(far_reader, writer, delay_s))

    server = await asyncio.start_server(serve, LOCAL, 0)
    try:
        yield f"{LOCAL}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Pass one direction's bytes, and its end."""
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due_s, data = await chunks.get()
            await asyncio.sleep(due_s - loop.time())
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(deliver())
        data = b"."
        while data:
            data = await reader.read(CHUNK_BYTES)
            chunks.put_nowait((loop.time() + delay_s, data))
