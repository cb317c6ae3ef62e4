"""Services that a suite measures: started for it, watched while it measures, and stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from coppice.cli.topology import LOCAL, Topology, TopologySpec
from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.obs.timeline import SUFFIX, TimelineEvent, read_timeline

Result = TypeVar("Result")
Started = TypeVar("Started")


@dataclass(frozen=True, slots=True)
class Metered:
    """A service, and where its metrics are."""

    address: str
    metrics_url: str


async def start_metered(add: Callable[[dict[str, str]], Awaitable[str]], env: Mapping[str, str]) -> Metered:
    """Start a service with metrics on a port of its own; `add` starts it with an environment."""
    port = await free_port()
    address = await add({**env, "METRICS_PORT": str(port)})
    return Metered(address, f"http://{LOCAL}:{port}/metrics")


async def measure_on(
    spec: TopologySpec,
    start: Callable[[Topology], Awaitable[Started]],
    measure: Callable[[Started], Coroutine[Any, Any, Result]],
) -> Result:
    """Start services, measure, and stop everything; a service that dies ends the measurement.

    Raises BenchmarkError if the measurement cannot go on, ChildError if a service did not start, or ended.
    """
    topology = Topology(spec)
    try:
        return await unless_one_fails(measure(await start(topology)), topology)
    finally:
        await topology.stop()


async def start_all(topology: Topology) -> Topology:
    """Start what the topology's specification says."""
    await topology.start()
    return topology


async def unless_one_fails(measuring: Coroutine[Any, Any, Result], *topologies: Topology) -> Result:
    """The result of a measurement; raises the ChildError of the first service that ends before."""
    measured = asyncio.create_task(measuring)
    failed = [asyncio.create_task(topology.failed()) for topology in topologies]
    try:
        await asyncio.wait([measured, *failed], return_when=asyncio.FIRST_COMPLETED)
        for wait in failed:
            if wait.done():
                raise wait.result()
        return measured.result()
    finally:
        for task in (measured, *failed):
            task.cancel()
        await asyncio.gather(measured, *failed, return_exceptions=True)


def kept_events(directory: Path, service: str) -> list[TimelineEvent]:
    """The events that a service has written to TIMELINE_DIR; raises BenchmarkError if it has written none."""
    paths = list(directory.glob(f"{service}-*{SUFFIX}"))
    if len(paths) != 1:
        raise BenchmarkError(f"{len(paths)} timelines of the {service} where one was expected")
    return read_timeline(paths[0])


async def free_port() -> int:
    """A port of this machine that no process listens on."""
    probe = await asyncio.start_server(lambda _reader, _writer: None, LOCAL, 0)
    async with probe:
        port: int = probe.sockets[0].getsockname()[1]
        return port
