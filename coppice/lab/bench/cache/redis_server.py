"""A Redis of the benchmark's own, on a free port of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from coppice.cli.topology import LOCAL
from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.bench.services import free_port

START_S = 10.0
_BETWEEN_TRIES_S = 0.02


def redis_program() -> str | None:
    """Where a Redis server is installed; None where none is."""
    return shutil.which("redis-server")


class RedisServer:
    """Starts, is killed, and starts again on the same port, empty."""

    def __init__(self, program: str, directory: Path, port: int) -> None:
        self._program = program
        self._directory = directory
        self._port = port
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return f"redis://{LOCAL}:{self._port}/0"

    async def start(self) -> None:
        """Start it, and return when it answers.

        Raises:
            BenchmarkError: it did not within `START_S`.
        """
        self._process = await asyncio.create_subprocess_exec(
            self._program,
            *("--port", str(self._port), "--bind", LOCAL, "--dir", str(self._directory)),
            *("--save", "", "--appendonly", "no"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(START_S):
                while True:
                    if await self._answers():
                        return
                    await asyncio.sleep(_BETWEEN_TRIES_S)
        except TimeoutError as error:
            raise BenchmarkError(f"redis-server did not answer within {START_S:g} s") from error

    async def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection(LOCAL, self._port)
        except OSError:
            return False
        with contextlib.closing(writer):
            writer.write(b"PING\r\n")
            return await reader.readline() == b"+PONG\r\n"


@contextlib.asynccontextmanager
async def redis_server(program: str) -> AsyncIterator[RedisServer]:
    """A running server.

    Raises:
        BenchmarkError: it does not start.
    """
    with tempfile.TemporaryDirectory() as directory:
        server = RedisServer(program, Path(directory), await free_port())
        try:
            await server.start()
            yield server
        finally:
            await server.kill()
