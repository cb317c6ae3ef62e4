"""`coppice bench load`: load through the public API."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coppice.cli.bench.options import (
    DRAFTER,
    OUT,
    TARGET,
    Concurrency,
    NumPrompts,
    Out,
    PromptsFile,
    Runs,
    Seed,
    Target,
    TpotTarget,
    TtftTarget,
    choose_prompts,
    numbers,
    require_checkpoint,
)
from coppice.cli.bench.services import finish, measure_or_exit
from coppice.cli.options import Threads, topology_spec
from coppice.kernels.openmp import set_spin_count

if TYPE_CHECKING:
    from coppice.lab.bench.load.loads import Arrival

# Of arrivals; far above it, a client measures how fast it opens streams.
MAX_RATE = 10


def load(
    prompts: PromptsFile = None,
    target: Target = TARGET,
    drafter: Annotated[
        str,
        typer.Option(
            metavar="KIND=DIR|none",
            help="The drafter's checkpoint directory; none: the bundled target drafts for itself.",
        ),
    ] = DRAFTER,
    out: Out = OUT,
    concurrency: Concurrency = "1,4,16,64",
    runs: Runs = 3,
    duration: Annotated[float, typer.Option(min=0.25, help="Seconds of a window; of each level of the step.")] = 10.0,
    rates: Annotated[
        str, typer.Option(metavar="F,F,…", help="Arrivals, in shares of saturation without speculation; empty: none.")
    ] = "0.6,0.9,1.2",
    trace: Annotated[
        Path | None, typer.Option(help="Arrivals as in this CSV file, with TIMESTAMP and GeneratedTokens.")
    ] = None,
    trace_speed: Annotated[float, typer.Option(min=0.001, help="How many times as fast the trace is played.")] = 1.0,
    step: Annotated[int, typer.Option(min=0, help="Requests at once on top of the step; 0 for no step.")] = 64,
    ttft_ms: TtftTarget = 1000.0,
    tpot_ms: TpotTarget = 50.0,
    transformers: Annotated[
        bool, typer.Option(help="Whether transformers by itself has its turn beside the closed loads (greedy ones).")
    ] = True,
    num_prompts: NumPrompts = 64,
    output_tokens: Annotated[str, typer.Option(metavar="MIN,MAX", help="Outputs are of random lengths.")] = "32,128",
    temperature: Annotated[float, typer.Option(min=0, max=100, help="Of every request.")] = 0.0,
    threads: Threads = 0,
    seed: Seed = 0,
) -> None:
    """Load through the public API: speculation off, small and large fixed budgets and the planner, in turn.

    So many requests at once, requests that arrive whatever the server does, and a step. Exit code 1 when a token is not
    what it is with speculation off.
    """
    set_spin_count()
    require_checkpoint(target, "--target")
    levels = numbers(concurrency, "--concurrency", least=1)
    shortest, longest = length_range(output_tokens)
    shares = multiples(rates, "--rates")
    chosen = choose_prompts(prompts, num_prompts, seed)

    from coppice.lab.bench.load.figures import Targets
    from coppice.lab.bench.load.suite import SHOWN, LoadPlan, LoadSuite

    targets = Targets(ttft_ms / 1000, tpot_ms / 1000)
    plan = LoadPlan(levels, runs, duration, shares, _read_trace(trace), trace_speed, step, targets, transformers)
    num_threads = threads or os.cpu_count() or 1
    suite = LoadSuite(target, tuple(chosen), plan, num_threads, shortest, longest, temperature, seed)
    finish(measure_or_exit(suite, topology_spec(str(target), [drafter], threads=threads)), SHOWN, out)


def multiples(text: str, option: str) -> tuple[float, ...]:
    """Shares or multiples of a rate, each once; raises typer.BadParameter where one is none."""
    try:
        rates = tuple(dict.fromkeys(float(part) for part in text.split(",") if part.strip()))
    except ValueError:
        rates = (0.0,)
    if not all(0 < rate < MAX_RATE for rate in rates):
        raise typer.BadParameter(f"{option}: needs numbers above 0 and below {MAX_RATE} such as 0.3,0.9, got {text!r}")
    return rates


def length_range(text: str) -> tuple[int, int]:
    """The bounds that `--output-tokens` says; raises typer.BadParameter where it says none."""
    lengths = numbers(text, "--output-tokens")
    if not 1 <= len(lengths) <= 2 or list(lengths) != sorted(lengths):
        raise typer.BadParameter(f"--output-tokens: needs a range such as 32,128, got {text!r}")
    return lengths[0], lengths[-1]


def _read_trace(path: Path | None) -> tuple[Arrival, ...]:
    from coppice.lab.bench.load.loads import TraceError, read_trace

    try:
        return () if path is None else tuple(read_trace(path))
    except TraceError as error:
        raise typer.BadParameter(f"--trace: {error}") from error
