"""`coppice bench profile`: a machine as the simulator knows it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coppice.bundled import MODELS
from coppice.cli.bench.options import Seed, choose_prompts, drafter_spec, require_checkpoint
from coppice.cli.bench.services import run_or_exit
from coppice.cli.options import Threads
from coppice.cli.topology import DEFAULT_KIND, TopologySpec, running
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
    seed: Seed = 0,
) -> None:
    """Passes, drafts, what they take from each other, and recorded outputs, for `coppice simulate`; some minutes."""
    set_spin_count()
    require_checkpoint(target, "--target")
    spec = TopologySpec(str(target), (drafter_spec(drafter),), threads=threads)

    from benchmarks.profile.suite import ProfileSuite
    from benchmarks.report import write_json

    chosen = tuple(choose_prompts(None, num_prompts, seed))
    report = run_or_exit(_measure(ProfileSuite(target, chosen, threads or os.cpu_count() or 1), spec))
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
