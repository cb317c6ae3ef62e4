"""`coppice bench`: how fast this is, compared with what."""

from __future__ import annotations

import os

import typer

from coppice.cli.bench import ablation, commands
from coppice.cli.options import with_groups

app = typer.Typer(help="Measure speed, with a table, JSON and plots.", no_args_is_help=True)


@app.callback()
def in_one_precision(context: typer.Context) -> None:
    """Serve targets in single precision, as those that they are compared with compute, unless DTYPE says otherwise.

    In the latency and peers suites these compute in the target's numbers instead.
    """
    if context.invoked_subcommand not in ("latency", "peers"):
        os.environ.setdefault("DTYPE", "float32")


# In the order in which --help shows them.
for command in (
    commands.prompts,
    commands.latency,
    commands.peers,
    commands.passes,
    commands.sampling,
    commands.throughput,
    commands.load,
    commands.overload,
    commands.overhead,
    commands.profile,
    commands.cache,
    commands.timeline,
    ablation.ablation,
    commands.report,
):
    app.command()(with_groups(command))
