"""`coppice bench profile`: a machine as the simulator knows it, and how far off that is."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from coppice.cli.bench import options as opt
from coppice.cli.bench.services import explained, run_or_exit
from coppice.cli.options import Threads
from coppice.cli.topology import TopologySpec


def profile(
    target: opt.Target = opt.TARGET,
    drafter: opt.Drafter = opt.DRAFTER,
    out: opt.Out = opt.OUT,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts, whose outputs are recorded.")] = 32,
    concurrency: Annotated[str, typer.Option(metavar="N,N,…", help="Requests at once, to fit to.")] = "1,8,64",
    validate: Annotated[
        str, typer.Option(metavar="N,N,…", help="Requests at once, to predict: also writes validation.json.")
    ] = "",
    runs: opt.Runs = 3,
    duration: Annotated[float, typer.Option(min=0.25, help="Seconds of a window.")] = 5.0,
    max_minutes: Annotated[
        float, typer.Option(min=1, help="No run begins that would not end by then; one is made in any case, or none.")
    ] = 40.0,
    threads: Threads = 0,
    seed: opt.Seed = 0,
) -> None:
    """Loads in service, and recorded outputs, for `coppice simulate`; some minutes.

    What passes, drafts and messages take is fitted to plain decoding and to fixed budgets of 2 and 8 nodes. With
    --validate, other policies take turns with these, and the simulator then predicts them.
    """
    opt.begin(target)
    levels = opt.numbers(concurrency, "--concurrency", least=1)
    predicted = opt.numbers(validate, "--validate")

    from coppice.lab.bench.harness.report import write_json
    from coppice.lab.bench.profile.suite import ProfilePlan, ProfileSuite

    plan = ProfilePlan(levels, validation=predicted, num_runs=runs, duration_s=duration, max_s=60 * max_minutes)
    chosen = tuple(opt.choose_prompts(None, num_prompts, seed))
    suite = ProfileSuite(target, chosen, opt.num_threads(threads), plan, seed=seed)
    spec = TopologySpec(str(target), (opt.drafter_spec(drafter),), threads=threads)
    with explained():
        report, loads = suite.reports(*run_or_exit(suite.run(spec)))
    # What took minutes to measure is kept whatever comes of the prediction.
    write_json(report, out / "profile.json")
    if loads is not None:
        write_json(loads, out / "validation.json")
        report["validation"], report["ratios"] = _validated(report, loads)
        write_json(report, out / "profile.json")
    for text in report["notes"]:
        typer.echo(text)
    typer.echo(f"wrote {out / 'profile.json'}" + (f" and {out / 'validation.json'}" if loads else ""))
    for text in loads["mismatches"] if loads else ():
        typer.echo(f"MISMATCH: {text}", err=True)
    if loads and loads["mismatches"]:
        raise typer.Exit(1)


def _validated(report: dict[str, Any], loads: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The measured loads beside those of the simulator, and how far off it is."""
    from coppice.lab.simulator.profile import profile_from_json
    from coppice.lab.simulator.report import print_comparison
    from coppice.lab.simulator.validation import compare, errors

    rows = []
    for row in compare(profile_from_json(report), loads):
        rows.append(row)
        typer.echo(f"simulated {row['name']}", err=True)
    ratios = errors(rows)
    print_comparison(rows, ratios)
    return rows, ratios
