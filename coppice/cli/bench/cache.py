"""`coppice bench cache`: the prefix cache, cold and warm."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from coppice.checkpoints.bundled import MODELS
from coppice.cli.bench.options import (
    PromptsFile,
    Seed,
    choose_prompts,
    choose_temperatures,
    drafter_spec,
    require_checkpoint,
)
from coppice.cli.bench.services import run_or_exit
from coppice.cli.options import Threads
from coppice.cli.topology import DEFAULT_KIND as SMALL_LM
from coppice.cli.topology import NO_DRAFTER, TopologySpec
from coppice.kernels.openmp import set_spin_count


def cache(
    prompts: PromptsFile = None,
    target: Annotated[Path, typer.Option(help="The target's checkpoint directory.")] = MODELS / "target",
    drafter: Annotated[
        str, typer.Option(metavar="KIND=DIR|none", help="The drafter beside the cache; none: the cache alone.")
    ] = f"{SMALL_LM}={MODELS / SMALL_LM}",
    out: Annotated[Path, typer.Option(help="Directory for cache.json and cache.png.")] = Path("results"),
    systems: Annotated[int, typer.Option(min=1, help="System prompts, the beginnings that prompts share.")] = 3,
    endings: Annotated[int, typer.Option(min=1, help="Prompts with each of them.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each completion, EOS or not.")] = 48,
    runs: Annotated[int, typer.Option(min=1, help="Times that the cache is filled; at least 3 to be quoted.")] = 3,
    temperature: Annotated[list[float] | None, typer.Option(help="Repeatable. Default: 0 and 1.")] = None,
    threads: Threads = 0,
    seed: Seed = 0,
) -> None:
    """The prefix cache under shared system prompts and repeated code: cold, warm, through Redis, and Redis killed.

    The cache beside a drafter and alone, one request at a time. Exit code 1 when a request failed, or when a token is
    not what it is with speculation off.
    """
    set_spin_count()
    require_checkpoint(target, "--target")
    drafters = () if drafter == NO_DRAFTER else (drafter_spec(drafter),)

    from coppice.lab.bench.cache.measure import CachePlan, settings
    from coppice.lab.bench.cache.plot import plot_cache
    from coppice.lab.bench.cache.services import measure_on_services
    from coppice.lab.bench.cache.suite import CacheSuite
    from coppice.lab.bench.cache.table import print_cache
    from coppice.lab.bench.cache.workload import make_workload, num_pieces
    from coppice.lab.bench.report import write_json

    chosen = choose_prompts(prompts, needed := num_pieces(systems, endings), seed)
    if len(chosen) < needed:
        raise typer.BadParameter(f"--prompts: {systems} system prompts x {endings} endings are made of {needed}")
    plan = CachePlan(settings(one.kind for one in drafters), choose_temperatures(temperature), runs, max_tokens, seed)
    suite = CacheSuite(target, make_workload(chosen, systems, endings), plan, threads or os.cpu_count() or 1)
    spec = TopologySpec(str(target), drafters, threads=threads)
    report = run_or_exit(measure_on_services(suite.run, spec))
    write_json(report, out / "cache.json")
    plot_cache(report, out / "cache.png")
    print_cache(report)
    typer.echo(f"wrote {out / 'cache.json'} and {out / 'cache.png'}")
    if report["mismatches"] or report["ratios"]["failed-requests"]:
        raise typer.Exit(1)
