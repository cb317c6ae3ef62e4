"""`coppice bench cache`: the prefix cache, cold and warm."""

from __future__ import annotations

from typing import Annotated

import typer

from coppice.cli.bench import options as opt
from coppice.cli.bench.services import finish, run_or_exit
from coppice.cli.options import Threads
from coppice.cli.topology import NO_DRAFTER, TopologySpec


def cache(
    prompts: opt.PromptsFile = None,
    target: opt.Target = opt.TARGET,
    drafter: Annotated[
        str, typer.Option(metavar="KIND=DIR|none", help="The drafter next to the cache; none: the cache alone.")
    ] = opt.DRAFTER,
    out: opt.Out = opt.OUT,
    systems: Annotated[int, typer.Option(min=1, help="System prompts, the beginnings that prompts share.")] = 3,
    endings: Annotated[int, typer.Option(min=1, help="Prompts with each of them.")] = 3,
    max_tokens: opt.MaxTokens = 48,
    runs: opt.Runs = 3,
    temperature: opt.Temperatures = None,
    threads: Threads = 0,
    seed: opt.Seed = 0,
) -> None:
    """The prefix cache under shared system prompts and repeated code: cold, warm, through Redis, and Redis killed.

    The cache with a drafter and alone, one request at a time. Exit code 1 when a request failed, or when a token is
    not what it is with speculation off.
    """
    opt.begin(target)
    drafters = () if drafter == NO_DRAFTER else (opt.drafter_spec(drafter),)

    from coppice.lab.bench.cache.services import measure_on_services
    from coppice.lab.bench.cache.suite import SHOWN, CacheSuite, settings
    from coppice.lab.bench.cache.workload import make_workload, num_pieces
    from coppice.lab.bench.comparison import Plan

    chosen = opt.choose_prompts(prompts, needed := num_pieces(systems, endings), seed)
    if len(chosen) < needed:
        raise typer.BadParameter(f"--prompts: {systems} system prompts x {endings} endings are made of {needed}")
    workload = make_workload(chosen, systems, endings)
    plan = Plan(runs, max_tokens, opt.choose_temperatures(temperature), seed)
    setup = opt.setup(target, workload.prompts, plan, threads)
    suite = CacheSuite(setup, workload, settings(one.kind for one in drafters))
    report = run_or_exit(measure_on_services(suite.run, TopologySpec(str(target), drafters, threads=threads)))
    finish(report, SHOWN, out)
    if report["ratios"]["failed-requests"]:
        raise typer.Exit(1)
