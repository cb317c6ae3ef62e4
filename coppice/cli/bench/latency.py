"""`coppice bench latency`: one stream, beside transformers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from coppice.bundled import MODELS
from coppice.cli.bench.options import (
    NumPrompts,
    PromptsFile,
    Seed,
    choose_prompts,
    choose_temperatures,
    drafter_spec,
    numbers,
    require_checkpoint,
)
from coppice.cli.bench.services import measure_or_exit
from coppice.cli.options import Threads
from coppice.cli.topology import DEFAULT_KIND as SMALL_LM
from coppice.cli.topology import DrafterSpec, TopologySpec
from coppice.openmp import set_spin_count

MAX_NODES_VARIABLE = "MAX_NODES"
MAX_SWEPT_NODES = 1024


def latency(
    prompts: PromptsFile = None,
    target: Annotated[Path, typer.Option(help="The target's checkpoint directory.")] = MODELS / "target",
    drafter: Annotated[
        str, typer.Option(metavar="small-lm=DIR", help="The small LM's checkpoint directory.")
    ] = f"{SMALL_LM}={MODELS / SMALL_LM}",
    out: Annotated[Path, typer.Option(help="Directory for latency.json and latency.png.")] = Path("benchmarks/results"),
    num_prompts: NumPrompts = 20,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each completion, EOS or not.")] = 128,
    runs: Annotated[int, typer.Option(min=1, help="Passes over all prompts; at least 3 to be quoted.")] = 3,
    temperature: Annotated[list[float] | None, typer.Option(help="Repeatable. Default: 0 and 1.")] = None,
    threads: Threads = 0,
    seed: Seed = 0,
    sweep_nodes: Annotated[
        str, typer.Option(metavar="N,N,…", help="Measure speculation with these node budgets as well.")
    ] = "",
) -> None:
    """One stream: transformers, transformers assisted, and us with speculation off and on, in turn.

    Exit code 1 when our output with speculation on is not what it is with speculation off.
    """
    # Before torch is imported: while another contender works, our waiting threads must sleep.
    set_spin_count()
    small_lm = _small_lm_directory(drafter)
    require_checkpoint(target, "--target")
    require_checkpoint(small_lm, "--drafter")
    budgets = _node_budgets(sweep_nodes)
    chosen = choose_prompts(prompts, num_prompts, seed)
    temperatures = choose_temperatures(temperature)

    from benchmarks.latency import Plan
    from benchmarks.latency_suite import LatencySuite

    spec = TopologySpec(str(target), (DrafterSpec(SMALL_LM, str(small_lm)),), threads=threads)
    plan = Plan(runs, max_tokens, temperatures, seed)
    # The services' own default, which they take for 0 threads.
    num_threads = threads or os.cpu_count() or 1
    default_nodes = _allow_nodes(budgets)
    suite = LatencySuite(target, small_lm, tuple(chosen), plan, num_threads, default_nodes, budgets)
    _report(measure_or_exit(suite, spec), out)


def _report(report: dict[str, Any], out: Path) -> None:
    from benchmarks.plot import plot_latency
    from benchmarks.report import write_json
    from benchmarks.table import print_report

    write_json(report, out / "latency.json")
    plot_latency(report["rows"], out / "latency.png")
    print_report(report)
    typer.echo(f"wrote {out / 'latency.json'} and {out / 'latency.png'}")
    if report["mismatches"]:
        raise typer.Exit(1)


def _allow_nodes(budgets: Sequence[int]) -> int | None:
    """Let the services, which inherit our environment, take the largest budget that is swept.

    Returns the budget that requests without one had until then, or None where nothing has changed.
    """
    from orchestrator.config import Config

    limit = int(os.environ.get(MAX_NODES_VARIABLE, Config.max_nodes))
    if max(budgets, default=0) <= limit:
        return None
    os.environ[MAX_NODES_VARIABLE] = str(max(budgets))
    return limit


def _small_lm_directory(drafter: str) -> Path:
    spec = drafter_spec(drafter)
    if spec.kind != SMALL_LM:
        # It is transformers' assistant too, which has to be a language model.
        raise typer.BadParameter(f"--drafter: this suite takes a {SMALL_LM}, got {drafter!r}")
    return Path(spec.model)


def _node_budgets(text: str) -> tuple[int, ...]:
    budgets = numbers(text, "--sweep-nodes")
    for nodes in budgets:
        if not 1 <= nodes <= MAX_SWEPT_NODES:
            raise typer.BadParameter(f"--sweep-nodes: {nodes} is not in [1, {MAX_SWEPT_NODES}]")
    return budgets
