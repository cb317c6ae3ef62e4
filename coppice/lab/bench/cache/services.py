"""Services of the cache benchmark: back ends, an orchestrator without a shared cache, two with one, and their Redis."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from coppice.cli.topology import LOCAL, Topology, TopologySpec, running
from coppice.lab.bench.client import Meter
from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.bench.services import free_port, start_metered, unless_one_fails
from orchestrator.prefix_cache.store import CacheCounts

START_S = 10.0
POLL_S = 0.02
UNWRITTEN = "coppice_orchestrator_prefix_cache_unwritten_outputs"
# By field of CacheCounts.
COUNTERS = {
    one.name: f"coppice_orchestrator_prefix_cache_{one.name}_total"
    for one in fields(CacheCounts)
    if one.name != "unwritten_outputs"
}


def redis_program() -> str | None:
    """Path of an installed Redis server; None without one."""
    return shutil.which("redis-server")


class RedisServer:
    """A Redis that is started, killed, and started again on the same port, empty."""

    def __init__(self, program: str, directory: str, port: int) -> None:
        self.url = f"redis://{LOCAL}:{port}/0"
        self._command = [program, "--port", str(port), "--bind", LOCAL, "--dir", directory]
        self._command += ["--save", "", "--appendonly", "no"]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it, and return when it answers. Raises BenchmarkError if it did not within `START_S`."""
        from redis.asyncio import Redis
        from redis.exceptions import RedisError

        silent = asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(*self._command, stdin=silent, stdout=silent)
        try:
            async with asyncio.timeout(START_S), Redis.from_url(self.url) as client:
                while True:
                    with contextlib.suppress(RedisError):
                        await client.ping()
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise BenchmarkError(f"redis-server did not answer within {START_S:g} s") from error

    async def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@contextlib.asynccontextmanager
async def redis_server(program: str) -> AsyncIterator[RedisServer]:
    """A running server. Raises BenchmarkError if it does not start."""
    with tempfile.TemporaryDirectory() as directory:
        server = RedisServer(program, directory, await free_port())
        try:
            await server.start()
            yield server
        finally:
            await server.kill()


@dataclass(frozen=True, slots=True)
class Instance:
    """An orchestrator; `counts` is what its prefix cache has counted, once what has ended is remembered."""

    address: str
    counts: Callable[[], Awaitable[CacheCounts]]


@dataclass(frozen=True, slots=True)
class Services:
    """Orchestrators with the same back ends. Without a Redis there is no second one that shares a cache."""

    # For what speculation off gives.
    plain: str
    first: Instance
    second: Instance | None = None
    redis: RedisServer | None = None


async def measure_on_services(
    measure: Callable[[Services], Coroutine[Any, Any, dict[str, Any]]], spec: TopologySpec
) -> dict[str, Any]:
    """Start everything, measure, and stop everything; a service that dies ends the measurement.

    Raises BenchmarkError if the measurement cannot go on, or Redis does not start, and ChildError if a service did not
    start, or ended.
    """
    async with contextlib.AsyncExitStack() as stack:
        topology = await stack.enter_async_context(running(spec))
        program = redis_program()
        redis = None if program is None else await stack.enter_async_context(redis_server(program))
        env = {
            "CACHE_DRAFTER": "true",
            "CACHE_SECRET": secrets.token_hex(32),
            "REDIS_URL": "" if redis is None else redis.url,
        }
        first = await _instance(topology, "first orchestrator", env)
        second = None if redis is None else await _instance(topology, "second orchestrator", env)
        return await unless_one_fails(measure(Services(topology.address, first, second, redis)), topology)


async def _instance(topology: Topology, name: str, env: dict[str, str]) -> Instance:
    metered = await start_metered(partial(topology.add_orchestrator, name), env)
    return Instance(
        metered.address, partial(_counts, Meter((metered.metrics_url,), {*COUNTERS.values(), UNWRITTEN}, name))
    )


async def _counts(meter: Meter) -> CacheCounts:
    while True:
        counted = await meter.read()
        if not counted.total(UNWRITTEN):
            return CacheCounts(**{field: int(counted.total(name)) for field, name in COUNTERS.items()})
        await asyncio.sleep(POLL_S)
