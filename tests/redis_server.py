"""A Redis of a test's own, on a free port of this machine, and a proxy in front of it that is as slow as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

PROGRAM = shutil.which("redis-server")
NO_REDIS = "no redis-server is installed, and make test could not install one"
needs_redis = [pytest.mark.redis, pytest.mark.skipif(PROGRAM is None, reason=NO_REDIS)]
_START_S = 60.0


class RedisServer:
    """Starts, is killed, and starts again on the same port, empty."""

    def __init__(self, directory: Path, *options: str) -> None:
        self._directory = directory
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self.port = _free_port()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        """Start it, and return when it answers.

        Raises:
            RuntimeError: Redis is not installed.
        """
        if PROGRAM is None:
            raise RuntimeError(NO_REDIS)
        self._process = await asyncio.create_subprocess_exec(
            PROGRAM,
            *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._directory)),
            *("--save", "", "--appendonly", "no", *self._options),
            stdout=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(_START_S), self.client() as client:
            while True:
                with contextlib.suppress(Exception):
                    if await client.ping():
                        return
                await asyncio.sleep(0.02)

    async def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Redis]:
        """A client of the test's own."""
        client = Redis.from_url(self.url)
        try:
            yield client
        finally:
            await client.aclose()


@contextlib.asynccontextmanager
async def redis_server(*options: str) -> AsyncIterator[RedisServer]:
    """A running server."""
    with tempfile.TemporaryDirectory() as directory:
        server = RedisServer(Path(directory), *options)
        await server.start()
        try:
            yield server
        finally:
            await server.kill()


class SlowProxy:
    """Passes bytes to a port and back, answers `delay_s` later."""

    def __init__(self, port: int, delay_s: float) -> None:
        self._port = port
        self.delay_s = delay_s
        self.num_connections = 0
        self.url = ""
        self._tasks: set[asyncio.Task[None]] = set()

    def leads_to(self, port: int) -> None:
        """New connections go to another port; the others end by themselves."""
        self._port = port

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[SlowProxy]:
        """Serve while the context is open."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._tasks.add(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_writer = None
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
            await asyncio.gather(self._pass(reader, far_writer, 0.0), self._pass(far_reader, writer, self.delay_s))
        finally:
            writer.close()
            if far_writer is not None:
                far_writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await asyncio.sleep(delay_s)
                writer.write(data)
                await writer.drain()
        writer.close()


def _free_port() -> int:
    """A free port that leaves room for a cluster's bus, 10,000 above."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            if port + 10_000 < 2**16:
                return port
