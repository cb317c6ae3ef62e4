"""`coppice bench throughput`: many requests at once, beside transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from coppice.checkpoints.bundled import MODELS
from coppice.cli.bench.options import PromptsFile, Seed, choose_prompts, drafter_spec, numbers, require_checkpoint
from coppice.cli.bench.services import measure_or_exit
from coppice.cli.options import Threads
from coppice.cli.topology import DEFAULT_KIND as SMALL_LM
from coppice.cli.topology import TopologySpec
from coppice.kernels.openmp import set_spin_count


def throughput(
    prompts: PromptsFile = None,
    target: Annotated[Path, typer.Option(help="The target's checkpoint directory.")] = MODELS / "target",
    drafter: Annotated[str, typer.Option(metavar="KIND=DIR", help="The drafter's checkpoint directory.")] = (
        f"{SMALL_LM}={MODELS / SMALL_LM}"
    ),
    out: Annotated[Path, typer.Option(help="Directory for throughput.json and throughput.png.")] = Path("results"),
    concurrency: Annotated[str, typer.Option(metavar="N,N,…", help="Requests at once.")] = "1,4,16,64",
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each completion, EOS or not.")] = 64,
    runs: Annotated[int, typer.Option(min=1, help="Batches of each size; at least 3 to be quoted.")] = 3,
    threads: Threads = 0,
    seed: Seed = 0,
) -> None:
    """Many requests at once: transformers' batched and continuous batching, and us with speculation off and on.

    Exit code 1 when our output with speculation on is not what it is with speculation off.
    """
    set_spin_count()
    require_checkpoint(target, "--target")
    levels = numbers(concurrency, "--concurrency")
    if not levels:
        raise typer.BadParameter("--concurrency: needs at least one number")
    chosen = choose_prompts(prompts, max(levels), seed)

    from coppice.lab.bench.plot import plot_throughput
    from coppice.lab.bench.report import write_json
    from coppice.lab.bench.table import print_throughput
    from coppice.lab.bench.throughput import ThroughputPlan
    from coppice.lab.bench.throughput_suite import ThroughputSuite

    spec = TopologySpec(str(target), (drafter_spec(drafter),), threads=threads)
    plan = ThroughputPlan(levels, runs, max_tokens)
    report = measure_or_exit(ThroughputSuite(target, tuple(chosen), plan, threads or os.cpu_count() or 1), spec)
    write_json(report, out / "throughput.json")
    plot_throughput(report["rows"], out / "throughput.png")
    print_throughput(report)
    typer.echo(f"wrote {out / 'throughput.json'} and {out / 'throughput.png'}")
    if report["mismatches"]:
        raise typer.Exit(1)
