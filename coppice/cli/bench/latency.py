"""`coppice bench latency`: one stream, and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coppice.cli.bench import options as opt
from coppice.cli.bench.services import finish, measure_or_exit, run_or_exit
from coppice.cli.options import Threads
from coppice.cli.topology import DEFAULT_KIND, DrafterSpec, TopologySpec

if TYPE_CHECKING:
    from coppice.lab.bench.forms import Form

NO_DELAY = "0"


def latency(
    prompts: opt.PromptsFile = None,
    target: opt.Target = opt.TARGET,
    drafter: Annotated[
        str, typer.Option(metavar="small-lm=DIR", help="The small LM's checkpoint directory.")
    ] = opt.DRAFTER,
    out: opt.Out = opt.OUT,
    num_prompts: opt.NumPrompts = 20,
    max_tokens: opt.MaxTokens = 128,
    runs: opt.Runs = 3,
    temperature: opt.Temperatures = None,
    threads: Threads = 0,
    seed: opt.Seed = 0,
    forms: Annotated[
        str,
        typer.Option(
            metavar="FORM,FORM,…",
            help="Measure these forms of the deployment as well: asynchronous, draft-ahead, synchronous, colocated.",
        ),
    ] = "",
    delays: Annotated[
        str,
        typer.Option(metavar="MS,MS,…", help="With --forms: add so much to the way between orchestrator and drafter."),
    ] = NO_DELAY,
) -> None:
    """One stream: transformers, transformers assisted, and us with speculation off and on, in turn.

    With --forms, also us as deployments whose rounds and drafters go together in other ways, or are further apart.
    Exit code 1 when our output with speculation on is not what it is with speculation off.
    """
    small_lm = _small_lm_directory(drafter)
    opt.begin(target)
    opt.require_checkpoint(small_lm, "--drafter")
    chosen = opt.choose_prompts(prompts, num_prompts, seed)
    temperatures = opt.choose_temperatures(temperature)
    chosen_forms = _forms(forms, delays)

    from coppice.lab.bench.comparison import Plan
    from coppice.lab.bench.forms import PANEL
    from coppice.lab.bench.harness.plots import draw
    from coppice.lab.bench.latency import SHOWN, LatencySuite, measure_with_forms

    spec = TopologySpec(str(target), (DrafterSpec(DEFAULT_KIND, str(small_lm)),), threads=threads)
    setup = opt.setup(target, chosen, Plan(runs, max_tokens, temperatures, seed), threads)
    suite = LatencySuite(setup, small_lm)
    if chosen_forms:
        report = run_or_exit(measure_with_forms(suite, spec, chosen_forms))
        draw(report, [PANEL], out / "forms.png")
    else:
        report = measure_or_exit(suite, spec)
    finish(report, SHOWN, out)


def _forms(names: str, delays: str) -> tuple[Form, ...]:
    """The forms asked for; raises typer.BadParameter where one cannot be had."""
    if not names.strip():
        if delays != NO_DELAY:
            raise typer.BadParameter("--delays: says how far apart the services of --forms are")
        return ()
    from coppice.lab.bench.forms import parse_forms
    from coppice.lab.bench.harness.experiment import BenchmarkError

    try:
        return parse_forms(names, delays)
    except BenchmarkError as error:
        raise typer.BadParameter(str(error)) from error


def _small_lm_directory(drafter: str) -> Path:
    spec = opt.drafter_spec(drafter)
    if spec.kind != DEFAULT_KIND:
        # It is transformers' assistant too, which has to be a language model.
        raise typer.BadParameter(f"--drafter: this suite takes a {DEFAULT_KIND}, got {drafter!r}")
    return Path(spec.model)
