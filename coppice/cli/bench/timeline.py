"""`coppice bench timeline`: one request's rounds as a picture, and where their time goes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from coppice.cli.bench import options as opt
from coppice.cli.bench.services import explained, finish, measure_or_exit
from coppice.cli.options import Threads
from coppice.cli.topology import TopologySpec


def timeline(
    prompts: opt.PromptsFile = None,
    target: opt.Target = opt.TARGET,
    drafter: opt.Drafter = opt.DRAFTER,
    out: opt.Out = opt.OUT,
    num_prompts: opt.NumPrompts = 4,
    max_tokens: opt.MaxTokens = 96,
    temperature: Annotated[float, typer.Option(min=0, max=100)] = 0.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in the picture.")] = 6,
    threads: Threads = 0,
    seed: opt.Seed = 0,
) -> None:
    """Every hop of a round: who was busy, and who waited. Requests one after another, each forced to speculate."""
    opt.require_checkpoint(target, "--target")
    spec = TopologySpec(str(target), (opt.drafter_spec(drafter),), threads=threads)
    chosen = opt.choose_prompts(prompts, num_prompts, seed)

    from coppice.lab.bench.timeline.suite import TimelineSuite, add_rounds, services_spec, shown
    from coppice.obs.timeline import Timeline

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        client = Timeline(directory / "client")
        suite = TimelineSuite(target, tuple(chosen), directory, client, max_tokens, temperature, seed)
        report = measure_or_exit(suite, services_spec(spec, directory))
        with explained():
            watched = suite.read_events()
            requests = add_rounds(report, watched)
    finish(report, shown(requests, watched.drafter, rounds), out)
