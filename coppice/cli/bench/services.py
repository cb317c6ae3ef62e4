"""Runs a suite beside the services that it measures."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

import typer

from coppice.cli.child import ChildError
from coppice.cli.topology import Topology, TopologySpec

Result = TypeVar("Result")


class Suite(Protocol):
    """A benchmark of services at an address."""

    def run(self, address: str) -> dict[str, Any]:
        """Measure and return the report."""
        ...


def measure_or_exit(suite: Suite, spec: TopologySpec) -> dict[str, Any]:
    """The suite's report of services as `spec` says, or exit code 1 with a line that says why there is none."""
    return run_or_exit(_measure(suite, spec))


def run_or_exit(measuring: Coroutine[Any, Any, Result]) -> Result:
    """The report of a measurement, or exit code 1 with a line that says why there is none."""
    from benchmarks.contenders import BenchmarkError

    try:
        return asyncio.run(measuring)
    except (BenchmarkError, ChildError) as error:
        typer.echo(f"coppice: {error}", err=True)
        raise typer.Exit(1) from error


async def _measure(suite: Suite, spec: TopologySpec) -> dict[str, Any]:
    """Run the suite in a thread, beside services whose failure ends it: without a drafter it would mean nothing."""
    topology = Topology(spec)
    tasks: list[asyncio.Task[Any]] = []
    try:
        await topology.start()
        measured = asyncio.create_task(asyncio.to_thread(suite.run, topology.address))
        failed = asyncio.create_task(topology.failed())
        tasks = [measured, failed]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            raise failed.result()
        return measured.result()
    finally:
        # The thread ends with the first call to a server that is gone.
        await topology.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
