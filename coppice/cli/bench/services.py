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
    from coppice.lab.bench.contenders import BenchmarkError

    try:
        return asyncio.run(measuring)
    except (BenchmarkError, ChildError) as error:
        typer.echo(f"coppice: {error}", err=True)
        raise typer.Exit(1) from error


async def _measure(suite: Suite, spec: TopologySpec) -> dict[str, Any]:
    """Run the suite in a thread, beside services whose failure ends it."""
    from coppice.lab.bench.beside_services import unless_one_fails

    topology = Topology(spec)
    try:
        await topology.start()
        return await unless_one_fails(topology, asyncio.to_thread(suite.run, topology.address))
    finally:
        await topology.stop()
