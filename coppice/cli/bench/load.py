"""`coppice bench load`: load through the public API."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coppice.cli.bench import options as opt
from coppice.cli.bench.services import finish, measure_or_exit
from coppice.cli.options import Threads, topology_spec

if TYPE_CHECKING:
    from coppice.lab.bench.load.loads import Arrival


def load(
    prompts: opt.PromptsFile = None,
    target: opt.Target = opt.TARGET,
    drafter: Annotated[
        str,
        typer.Option(
            metavar="KIND=DIR|none",
            help="The drafter's checkpoint directory; none: the bundled target drafts for itself.",
        ),
    ] = opt.DRAFTER,
    out: opt.Out = opt.OUT,
    concurrency: opt.Concurrency = "1,4,16,64",
    runs: opt.Runs = 3,
    duration: Annotated[float, typer.Option(min=0.25, help="Seconds of a window; of each level of the step.")] = 10.0,
    rates: Annotated[
        str, typer.Option(metavar="F,F,…", help="Arrivals, in shares of saturation without speculation; empty: none.")
    ] = "0.6,0.9,1.2",
    trace: Annotated[
        Path | None, typer.Option(help="Arrivals as in this CSV file, with TIMESTAMP and GeneratedTokens.")
    ] = None,
    trace_speed: Annotated[float, typer.Option(min=0.001, help="How many times as fast the trace is played.")] = 1.0,
    step: Annotated[int, typer.Option(min=0, help="Requests at once on top of the step; 0 for no step.")] = 64,
    ttft_ms: opt.TtftTarget = 1000.0,
    tpot_ms: opt.TpotTarget = 50.0,
    transformers: Annotated[
        bool, typer.Option(help="Whether transformers by itself has its turn beside the closed loads (greedy ones).")
    ] = True,
    num_prompts: opt.NumPrompts = 64,
    output_tokens: Annotated[str, typer.Option(metavar="MIN,MAX", help="Outputs are of random lengths.")] = "32,128",
    temperature: Annotated[float, typer.Option(min=0, max=100, help="Of every request.")] = 0.0,
    threads: Threads = 0,
    seed: opt.Seed = 0,
) -> None:
    """Load through the public API: speculation off, small and large fixed budgets and the planner, in turn.

    So many requests at once, requests that arrive whatever the server does, and a step. Exit code 1 when a token is not
    what it is with speculation off.
    """
    opt.begin(target)
    levels = opt.numbers(concurrency, "--concurrency", least=1)
    shortest, longest = opt.length_range(output_tokens)
    shares = opt.multiples(rates, "--rates")
    chosen = opt.choose_prompts(prompts, num_prompts, seed)

    from coppice.lab.bench.comparison import Plan
    from coppice.lab.bench.load.figures import Targets
    from coppice.lab.bench.load.suite import SHOWN, LoadPlan, LoadSuite

    targets = Targets(ttft_ms / 1000, tpot_ms / 1000)
    plan = LoadPlan(levels, duration, shares, _read_trace(trace), trace_speed, step, targets, transformers)
    setup = opt.setup(target, chosen, Plan(runs, longest, (temperature,), seed), threads)
    suite = LoadSuite(setup, plan, shortest)
    finish(measure_or_exit(suite, topology_spec(str(target), [drafter], threads=threads)), SHOWN, out)


def _read_trace(path: Path | None) -> tuple[Arrival, ...]:
    from coppice.lab.bench.load.loads import TraceError, read_trace

    try:
        return () if path is None else tuple(read_trace(path))
    except TraceError as error:
        raise typer.BadParameter(f"--trace: {error}") from error
