"""The benchmark's services: back ends, an orchestrator without a shared cache, two with one, and their Redis."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from coppice.cli.topology import LOCAL, Topology, TopologySpec
from coppice.lab.bench.cache import counted_orchestrator
from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.bench.services import free_port, unless_one_fails
from orchestrator.prefix_cache.store import CacheCounts

_SECRET_BYTES = 32
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
        """Start it, and return when it answers. Raises BenchmarkError if it did not within `START_S`."""
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
    """A running server. Raises BenchmarkError if it does not start."""
    with tempfile.TemporaryDirectory() as directory:
        server = RedisServer(program, Path(directory), await free_port())
        try:
            await server.start()
            yield server
        finally:
            await server.kill()


class Redis(Protocol):
    """A Redis that can be killed."""

    async def start(self) -> None:
        """Start it again, empty."""

    async def kill(self) -> None:
        """End it as a crash does."""


@dataclass(frozen=True, slots=True)
class Instance:
    """An orchestrator; `counts` is what its prefix cache has counted, once what has ended is remembered."""

    address: str
    counts: Callable[[], Awaitable[CacheCounts]]


@dataclass(frozen=True, slots=True)
class Services:
    """Orchestrators in front of the same back ends. Without a Redis there is no second one that shares a cache."""

    # For what speculation off gives.
    plain: str
    first: Instance
    second: Instance | None = None
    redis: Redis | None = None


async def measure_on_services(
    measure: Callable[[Services], Coroutine[Any, Any, dict[str, Any]]], spec: TopologySpec
) -> dict[str, Any]:
    """Start everything, measure, and stop everything; a service that dies ends the measurement.

    Raises BenchmarkError if the measurement cannot go on, or Redis does not start. Raises ChildError if a service did
    not start, or ended.
    """
    async with contextlib.AsyncExitStack() as stack:
        topology = Topology(spec)
        stack.push_async_callback(topology.stop)
        await topology.start()
        program = redis_program()
        redis = None if program is None else await stack.enter_async_context(redis_server(program))
        env = {"CACHE_SECRET": secrets.token_hex(_SECRET_BYTES), "REDIS_URL": "" if redis is None else redis.url}
        first = await _counted(topology, "first orchestrator", env)
        second = None if redis is None else await _counted(topology, "second orchestrator", env)
        return await unless_one_fails(topology, measure(Services(topology.address, first, second, redis)))


async def _counted(topology: Topology, name: str, env: dict[str, str]) -> Instance:
    port = await free_port()
    own = {**env, "CACHE_DRAFTER": "true", counted_orchestrator.PORT_VARIABLE: str(port)}
    address = await topology.add_orchestrator(name, own, counted_orchestrator.__name__)
    return Instance(address, partial(_counts, name, port))


async def _counts(name: str, port: int) -> CacheCounts:
    try:
        return await counted_orchestrator.read_counts(port)
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"{name} does not say what it has counted: {error}") from error
