"""`coppice bench`: how fast this is, and beside what. One file per suite."""

from __future__ import annotations

import typer

from coppice.cli.bench import (
    ablation,
    cache,
    latency,
    load,
    overhead,
    overload,
    passes,
    profile,
    prompts,
    report,
    throughput,
    timeline,
)

app = typer.Typer(help="Measure speed, with a table, JSON and plots.", no_args_is_help=True)
app.command()(prompts.prompts)
app.command()(latency.latency)
app.command()(passes.passes)
app.command()(throughput.throughput)
app.command()(load.load)
app.command()(overload.overload)
app.command()(overhead.overhead)
app.command()(profile.profile)
app.command()(cache.cache)
app.command()(timeline.timeline)
app.command()(ablation.ablation)
app.command()(report.report)
