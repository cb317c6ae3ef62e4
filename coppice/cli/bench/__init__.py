"""`coppice bench`: how fast this is, compared with what. One file per suite."""

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

# In the order in which --help shows them.
COMMANDS = (
    *(prompts.prompts, latency.latency, passes.passes, throughput.throughput, load.load, overload.overload),
    *(overhead.overhead, profile.profile, cache.cache, timeline.timeline, ablation.ablation, report.report),
)

app = typer.Typer(help="Measure speed, with a table, JSON and plots.", no_args_is_help=True)
for command in COMMANDS:
    app.command()(command)
