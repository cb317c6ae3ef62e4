"""A TCP server for tests that leaves no connection open when it ends."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def stream_server(answer: Answer) -> AsyncIterator[str]:
    """Run `answer` for each connection to a free port of this machine, whose address is yielded.

    At the end what still runs is cancelled and every connection is closed: asyncio's own server leaves both to the
    garbage collector, whose warning then fails whichever test runs at that time.
    """
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.create_task(serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        # Connections that were just accepted get their task, and new tasks their first turn, before they are cancelled.
        for _ in range(3):
            await asyncio.sleep(0)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
