"""`coppice bench cache`: the prefix cache, cold and warm."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from coppice.cli.bench.options import (
    DRAFTER,
    OUT,
    TARGET,
    MaxTokens,
    Out,
    PromptsFile,
    Runs,
    Seed,
    Target,
    Temperatures,
    choose_prompts,
    choose_temperatures,
    drafter_spec,
    require_checkpoint,
)
from coppice.cli.bench.services import finish, run_or_exit
from coppice.cli.options import Threads
from coppice.cli.topology import NO_DRAFTER, TopologySpec
from coppice.kernels.openmp import set_spin_count


def cache(
    prompts: PromptsFile = None,
    target: Target = TARGET,
    drafter: Annotated[
        str, typer.Option(metavar="KIND=DIR|none", help="The drafter next to the cache; none: the cache alone.")
    ] = DRAFTER,
    out: Out = OUT,
    systems: Annotated[int, typer.Option(min=1, help="System prompts, the beginnings that prompts share.")] = 3,
    endings: Annotated[int, typer.Option(min=1, help="Prompts with each of them.")] = 3,
    max_tokens: MaxTokens = 48,
    runs: Runs = 3,
    temperature: Temperatures = None,
    threads: Threads = 0,
    seed: Seed = 0,
) -> None:
    """The prefix cache under shared system prompts and repeated code: cold, warm, through Redis, and Redis killed.

    The cache with a drafter and alone, one request at a time. Exit code 1 when a request failed, or when a token is
    not what it is with speculation off.
    """
    set_spin_count()
    require_checkpoint(target, "--target")
    drafters = () if drafter == NO_DRAFTER else (drafter_spec(drafter),)

    from coppice.lab.bench.cache.services import measure_on_services
    from coppice.lab.bench.cache.suite import SHOWN, CachePlan, CacheSuite, settings
    from coppice.lab.bench.cache.workload import make_workload, num_pieces

    chosen = choose_prompts(prompts, needed := num_pieces(systems, endings), seed)
    if len(chosen) < needed:
        raise typer.BadParameter(f"--prompts: {systems} system prompts x {endings} endings are made of {needed}")
    plan = CachePlan(settings(one.kind for one in drafters), choose_temperatures(temperature), runs, max_tokens, seed)
    suite = CacheSuite(target, make_workload(chosen, systems, endings), plan, threads or os.cpu_count() or 1)
    report = run_or_exit(measure_on_services(suite.run, TopologySpec(str(target), drafters, threads=threads)))
    finish(report, SHOWN, out)
    if report["ratios"]["failed-requests"]:
        raise typer.Exit(1)
