"""`coppice bench timeline`: one request's rounds as a picture, and where their time goes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from coppice.checkpoints.bundled import MODELS
from coppice.cli.bench.options import NumPrompts, PromptsFile, Seed, choose_prompts, drafter_spec, require_checkpoint
from coppice.cli.bench.services import measure_or_exit
from coppice.cli.options import Threads
from coppice.cli.topology import DEFAULT_KIND as SMALL_LM
from coppice.cli.topology import TopologySpec


def timeline(
    prompts: PromptsFile = None,
    target: Annotated[Path, typer.Option(help="The target's checkpoint directory.")] = MODELS / "target",
    drafter: Annotated[str, typer.Option(metavar="KIND=DIR", help="The drafter.")] = f"{SMALL_LM}={MODELS / SMALL_LM}",
    out: Annotated[Path, typer.Option(help="Directory for timeline.json and .png.")] = Path("results"),
    num_prompts: NumPrompts = 4,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each completion, EOS or not.")] = 96,
    temperature: Annotated[float, typer.Option(min=0, max=100)] = 0.0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in the picture.")] = 6,
    threads: Threads = 0,
    seed: Seed = 0,
) -> None:
    """Every hop of a round: who was busy, and who waited. Requests one after another, each forced to speculate."""
    require_checkpoint(target, "--target")
    spec = TopologySpec(str(target), (drafter_spec(drafter),), threads=threads)
    chosen = choose_prompts(prompts, num_prompts, seed)

    from coppice.lab.bench.contenders import BenchmarkError
    from coppice.lab.bench.report import write_json
    from coppice.lab.bench.timeline.figures import shown_rounds
    from coppice.lab.bench.timeline.plot import plot_timeline
    from coppice.lab.bench.timeline.suite import TimelineSuite, add_rounds, keeping_events, read_events
    from coppice.lab.bench.timeline.table import print_timeline
    from coppice.obs.timeline import Timeline

    # What is remembered of earlier requests would stand beside the drafter.
    os.environ["CACHE_DRAFTER"] = "false"
    with tempfile.TemporaryDirectory() as directory:
        client = Timeline(Path(directory) / "client")
        suite = TimelineSuite(target, tuple(chosen), client, max_tokens, temperature, seed)
        with keeping_events(Path(directory)):
            report = measure_or_exit(suite, spec)
        try:
            watched = read_events(Path(directory), client)
            requests = add_rounds(report, watched)
        except BenchmarkError as error:
            typer.echo(f"coppice: {error}", err=True)
            raise typer.Exit(1) from error
    write_json(report, out / "timeline.json")
    ahead = [event for event in watched.drafter if event.what == "ahead"]
    plot_timeline(shown_rounds(requests, rounds), ahead, out / "timeline.png")
    print_timeline(report)
    typer.echo(f"wrote {out / 'timeline.json'} and {out / 'timeline.png'}")
