"""`coppice bench profile`: a machine as the simulator knows it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coppice.bundled import MODELS
from coppice.cli.child import ChildError
from coppice.cli.options import Threads
from coppice.cli.topology import DEFAULT_KIND, DrafterSpec, TopologySpec, running
from coppice.openmp import set_spin_count

if TYPE_CHECKING:
    from benchmarks.profile.suite import ProfileSuite


def profile(
    target: Annotated[Path, typer.Option(help="The target's checkpoint directory.")] = MODELS / "target",
    drafter: Annotated[str, typer.Option(metavar="KIND=DIR", help="The drafter's checkpoint directory.")] = (
        f"{DEFAULT_KIND}={MODELS / DEFAULT_KIND}"
    ),
    out: Annotated[Path, typer.Option(help="Directory for profile.json.")] = Path("benchmarks/results"),
    num_prompts: Annotated[int, typer.Option(min=4, help="Outputs that are recorded.")] = 16,
    threads: Threads = 0,
    seed: Annotated[int, typer.Option(help="Of the choice of prompts.")] = 0,
) -> None:
    """Passes, drafts, what they take from each other, and recorded outputs, for `coppice simulate`; some minutes."""
    set_spin_count()
    if not (target / "config.json").is_file():
        raise typer.BadParameter(f"--target: no checkpoint in {target}")
    try:
        spec = TopologySpec(str(target), (DrafterSpec.parse(drafter),), threads=threads)
    except ValueError as error:
        raise typer.BadParameter(f"--drafter: {error}") from error

    from benchmarks.contenders import BenchmarkError
    from benchmarks.profile.suite import ProfileSuite
    from benchmarks.prompts import PromptsError, held_out_prompts
    from benchmarks.report import write_json

    try:
        prompts = tuple(held_out_prompts(num_prompts, seed))
        suite = ProfileSuite(target, prompts, threads or os.cpu_count() or 1)
        report = asyncio.run(_measure(suite, spec))
    except (BenchmarkError, ChildError, PromptsError) as error:
        typer.echo(f"coppice: {error}", err=True)
        raise typer.Exit(1) from error
    write_json(report, out / "profile.json")
    for row in report["rows"]:
        typer.echo(f"{row['name']:>14}  pass {row['pass_ms']:8.2f} ms  gap {row['gap_ms']:6.2f} ms")
    for text in report["notes"]:
        typer.echo(text)
    typer.echo(f"wrote {out / 'profile.json'}")


async def _measure(suite: ProfileSuite, spec: TopologySpec) -> dict[str, Any]:
    from benchmarks.profile.suite import Addresses

    async with running(spec) as topology:
        [verifier], [drafter] = topology.verifier_addresses, topology.drafter_addresses
        return await suite.run(Addresses(topology.address, verifier, drafter))
