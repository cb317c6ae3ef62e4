"""`coppice bench ablation`: what each drafter, shape of tree and way to choose children is worth."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from coppice.bundled import MODELS
from coppice.cli.bench.options import (
    PromptsFile,
    Seed,
    choose_prompts,
    choose_temperatures,
    drafter_spec,
    numbers,
    require_checkpoint,
)
from coppice.cli.bench.services import run_or_exit
from coppice.cli.options import Threads
from coppice.cli.topology import DrafterSpec, TopologySpec
from coppice.openmp import set_spin_count

ASYNCHRONOUS, SYNCHRONOUS = "asynchronous", "synchronous"
TEMPERATURES = [0.0, 0.7, 1.0]
# What `--quick` measures, unless an option says otherwise.
QUICK_TEMPERATURES = [0.0, 1.0]
USUAL_SIZES, QUICK_SIZES = (8, 96, 3), (2, 24, 1)


def ablation(
    prompts: PromptsFile = None,
    target: Annotated[Path, typer.Option(help="The target's checkpoint directory.")] = MODELS / "target",
    drafter: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND=DIR", help="Repeatable, one of a kind. Default: every kind that is in models/."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory for ablation.json and .png.")] = Path("benchmarks/results"),
    num_prompts: Annotated[int | None, typer.Option(min=1, help="How many prompts to use. Default: 8.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Tokens of each completion. Default: 96.")] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="Passes over all prompts. Default: 3.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="Repeatable. Default: 0, 0.7 and 1.")] = None,
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Of trees and of chains that are compared.")] = 8,
    masks: Annotated[str, typer.Option(metavar="K,K,…", help="Masks of semi-ar drafters to try.")] = "2,4",
    gammas: Annotated[str, typer.Option(metavar="N,N,…", help="Tokens of diffusion blocks to try.")] = "4,8",
    rounds: Annotated[
        str,
        typer.Option(
            metavar="FORM",
            help="asynchronous, as it serves; synchronous: each round waits for its draft, so that counts, τ among "
            "them, do not depend on how busy the machine is, and speed is not what it could be.",
        ),
    ] = ASYNCHRONOUS,
    quick: Annotated[bool, typer.Option("--quick", help="2 prompts x 24 tokens, 1 run, T=0 and 1, no grids.")] = False,
    threads: Threads = 0,
    seed: Seed = 0,
) -> None:
    """Drafters alone, in pairs and all; trees and chains; coupling and calibration: in turn with speculation off.

    Exit code 1 when a token is not what it is with speculation off.
    """
    set_spin_count()
    require_checkpoint(target, "--target")
    drafters = _drafters(drafter)
    if rounds not in (ASYNCHRONOUS, SYNCHRONOUS):
        raise typer.BadParameter(f"--rounds: must be {ASYNCHRONOUS} or {SYNCHRONOUS}, got {rounds!r}")
    tried = numbers(masks, "--masks"), numbers(gammas, "--gammas")
    temperatures = choose_temperatures(temperature or (QUICK_TEMPERATURES if quick else TEMPERATURES))
    sizes = QUICK_SIZES if quick else USUAL_SIZES
    count, length, num_runs = (
        given or usual for given, usual in zip((num_prompts, max_tokens, runs), sizes, strict=True)
    )
    chosen = choose_prompts(prompts, count, seed)

    from benchmarks.ablation.plot import plot_ablation
    from benchmarks.ablation.services import measure_on_services
    from benchmarks.ablation.suite import AblationSuite
    from benchmarks.ablation.table import print_ablation
    from benchmarks.ablation.variants import Grids, make_groups
    from benchmarks.latency import Plan
    from benchmarks.report import write_json

    grids = Grids() if quick else Grids(*tried)
    groups = make_groups(drafters, temperatures, nodes, grids)
    plan = Plan(num_runs, length, temperatures, seed)
    suite = AblationSuite(target, drafters, groups, tuple(chosen), plan, nodes, rounds, threads or os.cpu_count() or 1)
    spec = TopologySpec(str(target), (), threads=threads)
    report = run_or_exit(measure_on_services(suite.run, spec, groups, rounds))
    write_json(report, out / "ablation.json")
    plot_ablation(report, out / "ablation.png")
    print_ablation(report)
    typer.echo(f"wrote {out / 'ablation.json'} and {out / 'ablation.png'}")
    if report["mismatches"]:
        raise typer.Exit(1)


def _drafters(texts: list[str] | None) -> tuple[DrafterSpec, ...]:
    """One drafter of each kind; raises typer.BadParameter where there is none, or two of a kind."""
    from drafter_svc.drafters.registry import KINDS

    if texts is None:
        found = tuple(
            DrafterSpec(kind, str(MODELS / kind)) for kind in KINDS if (MODELS / kind / "config.json").is_file()
        )
    else:
        found = tuple(map(drafter_spec, texts))
    kinds = [spec.kind for spec in found]
    if not kinds or len(set(kinds)) < len(kinds):
        raise typer.BadParameter("--drafter: needs one checkpoint of each kind, and at least one")
    for spec in found:
        require_checkpoint(Path(spec.model), "--drafter")
    return found
