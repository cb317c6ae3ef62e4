"""Runs a suite and the services that it measures, and ends its command."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import typer

from coppice.cli.child import ChildError
from coppice.cli.topology import TopologySpec

if TYPE_CHECKING:
    from coppice.lab.bench.harness.report import Report, Shown

Result = TypeVar("Result")


class Suite(Protocol):
    """A benchmark of services at an address."""

    async def run(self, address: str) -> dict[str, Any]:
        """Measure and return the report."""
        ...


def measure_or_exit(suite: Suite, spec: TopologySpec) -> Report:
    """The suite's report of services as `spec` says, or exit code 1 with a line that says why there is none."""
    from coppice.lab.bench.services import measure_on, start_all

    return run_or_exit(measure_on(spec, start_all, suite.run))


def run_or_exit(measuring: Coroutine[Any, Any, Result]) -> Result:
    """The report of a measurement, or exit code 1 with a line that says why there is none."""
    with explained():
        return asyncio.run(measuring)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """An error of the benchmark or of a service is one line on stderr and exit code 1."""
    from coppice.lab.bench.harness.experiment import BenchmarkError

    try:
        yield
    except (BenchmarkError, ChildError) as error:
        typer.echo(f"coppice: {error}", err=True)
        raise typer.Exit(1) from error


def finish(report: Report, shown: Shown, out: Path) -> None:
    """Write a suite's files, print its tables, and exit with code 1 where outputs differ that must not."""
    from coppice.lab.bench.harness.report import write_report

    typer.echo(write_report(report, shown, out))
    if report["mismatches"]:
        raise typer.Exit(1)
