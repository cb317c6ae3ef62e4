"""`coppice bench overhead`: what planning and passing on costs, apart from any model."""

from __future__ import annotations

from typing import Annotated

import typer

from coppice.cli.bench import options as opt
from coppice.cli.bench.services import explained, finish


def overhead(
    out: opt.Out = opt.OUT,
    requests: Annotated[str, typer.Option(metavar="N,N,…", help="Requests at once.")] = "1,16,64",
    nodes: Annotated[int, typer.Option(min=4, max=1024, help="Nodes of each draft.")] = 32,
    passes: Annotated[int, typer.Option(min=1, help="Passes that are planned, at each number of requests.")] = 1000,
    rounds: Annotated[int, typer.Option(min=1, help="About so many rounds, of all requests together.")] = 6400,
    seed: Annotated[int, typer.Option(min=0, help="Of the planner's trees.")] = 0,
) -> None:
    """What the planner costs per pass, and the orchestrator per round between peers that answer at once. No models."""
    levels = opt.numbers(requests, "--requests", least=1)

    from coppice.lab.bench.overhead.suite import SHOWN, OverheadPlan, measure_overhead

    with explained():
        report = measure_overhead(OverheadPlan(levels, nodes, passes, rounds, seed))
    finish(report, SHOWN, out)
