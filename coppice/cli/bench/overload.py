"""`coppice bench overload`: more requests than the server can do."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated

import typer

from coppice.cli.bench import options as opt
from coppice.cli.bench.services import finish, measure_or_exit, run_or_exit
from coppice.cli.options import Threads
from coppice.cli.topology import LOCAL, TopologySpec


def overload(
    prompts: opt.PromptsFile = None,
    target: opt.Target = opt.TARGET,
    drafter: opt.Drafter = opt.DRAFTER,
    out: opt.Out = opt.OUT,
    factors: Annotated[str, typer.Option(metavar="F,F,…", help="Loads, in multiples of saturation.")] = "1,2,4",
    runs: opt.Runs = 2,
    duration: Annotated[
        float, typer.Option(min=0.25, help="Seconds of a load; the calm one takes twice as long.")
    ] = 20.0,
    recovery: Annotated[float, typer.Option(min=0.25, help="Seconds of calm load after each overload.")] = 10.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once that saturate the server.")] = 32,
    max_token_ms: Annotated[
        float | None,
        typer.Option(min=0, help="MAX_TOKEN_MS of the orchestrator; 0: no bound. Default: by --token-ratio."),
    ] = None,
    token_ratio: Annotated[
        float,
        typer.Option(min=1, help="How much longer than alone a request may take per token; alone is measured first."),
    ] = 3.0,
    max_queue_wait_s: Annotated[
        float, typer.Option(min=0, help="MAX_QUEUE_WAIT_S of the orchestrator; 0: no bound.")
    ] = 0.15,
    leaving: Annotated[float, typer.Option(min=0, max=0.5, help="Share of clients that leave early.")] = 0.05,
    slow: Annotated[float, typer.Option(min=0, max=0.5, help="Share of clients that read slowly.")] = 0.05,
    ttft_ms: opt.TtftTarget = 1000.0,
    tpot_ms: opt.TpotTarget = 50.0,
    num_prompts: opt.NumPrompts = 64,
    output_tokens: Annotated[str, typer.Option(metavar="MIN,MAX", help="Outputs are of lognormal lengths.")] = "16,128",
    threads: Threads = 0,
    seed: opt.Seed = 0,
) -> None:
    """Requests at 0.7, 1, 2 and 4 times what saturates the server, which wait for no answer.

    Who is refused and how, what those who get in wait for, how many wait, and how soon it is over. Exit code 1 when a
    token is not what it is with speculation off, or a request fails otherwise than by a refusal that says when to come
    again.
    """
    opt.begin(target)
    loads = opt.multiples(factors, "--factors")
    if not loads:
        raise typer.BadParameter("--factors: needs at least one number")
    shortest, longest = opt.length_range(output_tokens)
    chosen = opt.choose_prompts(prompts, num_prompts, seed)

    from coppice.lab.bench.comparison import Plan
    from coppice.lab.bench.load.figures import Targets
    from coppice.lab.bench.overload import SHOWN, OverloadPlan, OverloadSuite, Visitors
    from coppice.lab.bench.services import free_port, measure_on, start_all

    visitors, targets = Visitors(leaving, slow), Targets(ttft_ms / 1000, tpot_ms / 1000)
    plan = OverloadPlan(loads, duration, recovery, concurrency, visitors, shortest, targets)
    suite = OverloadSuite(opt.setup(target, chosen, Plan(runs, longest, (0.0,), seed), threads), plan)
    spec = TopologySpec(str(target), (opt.drafter_spec(drafter),), threads=threads)
    alone_ms = None
    if max_token_ms is None:
        alone_ms = run_or_exit(measure_on(spec, start_all, suite.alone))
        max_token_ms = round(token_ratio * alone_ms, 3)
        typer.echo(f"a request alone takes {alone_ms:g} ms per token; bound: {max_token_ms:g} ms")
    port = asyncio.run(free_port())
    suite = replace(
        suite,
        max_token_ms=max_token_ms,
        max_queue_wait_s=max_queue_wait_s,
        alone_token_ms=alone_ms,
        metrics_url=f"http://{LOCAL}:{port}/metrics",
    )
    bounds = {"MAX_TOKEN_MS": f"{max_token_ms:g}", "MAX_QUEUE_WAIT_S": f"{max_queue_wait_s:g}"}
    settings = tuple({**bounds, "METRICS_PORT": str(port)}.items())
    finish(measure_or_exit(suite, replace(spec, settings=settings)), SHOWN, out)
