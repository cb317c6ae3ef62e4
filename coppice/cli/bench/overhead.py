"""`coppice bench overhead`: what planning and passing on costs, apart from any model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coppice.cli.bench.options import numbers


def overhead(
    out: Annotated[Path, typer.Option(help="Directory for overhead.json.")] = Path("results"),
    requests: Annotated[str, typer.Option(metavar="N,N,…", help="Requests at once.")] = "1,16,64",
    nodes: Annotated[int, typer.Option(min=4, max=1024, help="Nodes of each draft.")] = 32,
    passes: Annotated[int, typer.Option(min=1, help="Passes that are planned, at each number of requests.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="About so many rounds, of all requests together.")] = 6400,
    seed: Annotated[int, typer.Option(min=0, help="Of the planner's trees.")] = 0,
) -> None:
    """What the planner costs per pass, and the orchestrator per round between peers that answer at once. No models."""
    levels = numbers(requests, "--requests")
    if not levels:
        raise typer.BadParameter("--requests: needs at least one number")

    from coppice.lab.bench.contenders import BenchmarkError
    from coppice.lab.bench.overhead.suite import OverheadPlan, measure_overhead
    from coppice.lab.bench.overhead.table import print_overhead
    from coppice.lab.bench.report import write_json

    try:
        report = measure_overhead(OverheadPlan(levels, nodes, passes, rounds, seed))
    except BenchmarkError as error:
        typer.echo(f"coppice: {error}", err=True)
        raise typer.Exit(1) from error
    write_json(report, out / "overhead.json")
    print_overhead(report)
    typer.echo(f"wrote {out / 'overhead.json'}")
