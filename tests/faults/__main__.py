"""`python -m tests.faults`: faults and fuzzing in full; exit code 1 where anything that must hold did not."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from coppice.kernels.cpu.openmp import set_spin_count
from coppice.lab.bench.environment import describe_machine, describe_run

MINUTE_S = 60.0
# Of the messages; what is left goes to the verifier, whose door is the fastest.
PUBLIC_SHARE, DRAFTER_SHARE, PEERS_SHARE = 0.25, 0.25, 0.05


def main(
    faults: Annotated[int, typer.Option(min=0, help="Faults to inject, at least; 0 leaves them out.")] = 1000,
    messages: Annotated[int, typer.Option(min=0, help="Messages to fuzz with, at least; 0 leaves it out.")] = 100_000,
    soak_minutes: Annotated[float, typer.Option(min=0, help="Go on with faults for at least so long.")] = 0.0,
    kills: Annotated[bool, typer.Option(help="Whether verifiers and drafters are killed, too.")] = True,
    gap_s: Annotated[float, typer.Option(min=0.01, help="Mean time from one fault to the next.")] = 0.3,
    seed: Annotated[int, typer.Option(min=0, help="The same seed draws the same faults and messages.")] = 0,
    clients: Annotated[int, typer.Option(min=1, help="Clients, of which every second one speaks HTTP.")] = 8,
    target: Annotated[
        str, typer.Option(help="smollm2-135m: disturb this target and its head, not a tiny random model.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Write what happened there, as JSON.")] = None,
) -> None:
    """Disturb a whole deployment under load, then fuzz the doors of all services; print what happened."""
    set_spin_count()
    logging.basicConfig(level=logging.CRITICAL)
    # Here, because torch reads that setting when it is imported.
    from transformers.utils import logging as transformers_logging

    from tests.faults.run import Plan, Report

    transformers_logging.disable_progress_bar()
    report, fuzzed, machine = Report(), {}, describe_machine()
    if faults or soak_minutes:
        plan = Plan(
            num_faults=faults,
            least_s=soak_minutes * MINUTE_S,
            mean_gap_s=gap_s,
            num_clients=clients,
            kills=kills,
            seed=seed,
        )
        report = asyncio.run(disturbed(plan, target))
        show(report)
    if messages:
        fuzzed = asyncio.run(fuzz_all(messages, seed, report.violations))
    command = f"python -m tests.faults {shlex.join(sys.argv[1:])}"
    counts = {"faults": dict(report.faults), "requests": dict(report.requests)}
    told = {name: value for name, value in vars(report).items() if name != "flips_s"}
    result = {**told, **counts, "fuzzed": fuzzed, "seed": seed, **describe_run(machine), "command": command}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n")
    for violation in report.violations:
        typer.echo(f"VIOLATION: {violation}")
    typer.echo(f"{len(report.violations)} violations (seed {seed})")
    raise typer.Exit(bool(report.violations))


async def disturbed(plan: Any, target: str) -> Any:
    """A run on processes of their own."""
    from tests.faults.deployment import deployed
    from tests.faults.run import fault_run

    async with deployed(plan.seed, target) as deployment:
        return await fault_run(deployment, plan, typer.echo)


async def fuzz_all(num_messages: int, seed: int, violations: list[str]) -> dict[str, dict[str, float]]:
    """Fuzz every door, one after the other; what must not be is added to `violations`."""
    from tests.faults.doors import drafter_door, peers_door, public_door, verifier_door, write_checkpoint
    from tests.faults.fuzz import FuzzError, fuzz

    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory))
        public, drafts, answers = (round(num_messages * share) for share in (PUBLIC_SHARE, DRAFTER_SHARE, PEERS_SHARE))
        for make, share in (
            (public_door(), public),
            (verifier_door(Path(directory)), num_messages - public - drafts - answers),
            (drafter_door(Path(directory)), drafts),
            (peers_door(), answers),
        ):
            started = time.monotonic()
            async with make as door:
                counts: Counter[str] = Counter()
                try:
                    counts = await fuzz(door, share, seed, typer.echo)
                except FuzzError as error:
                    violations.append(str(error))
            results[door.name] = {**counts, "seconds": round(time.monotonic() - started)}
            rows(f"messages at the door of the {door.name}", results[door.name].items())
    return results


def show(report: Any) -> None:
    """The run as tables."""
    rows("faults", report.faults.most_common())
    rows("requests by their end", report.requests.most_common())
    figures = (
        "wrong",
        "hung",
        "crashed",
        "unreadable_headers",
        "http_requests",
        "num_tokens",
        "seconds",
        "recovered_s",
    )
    rows("in all", [("faults", report.faults.total()), *((name, getattr(report, name)) for name in figures)])
    for name, growth in report.memory.items():
        rows(f"memory of {name}", growth.items())
    for name, counts in report.held.items():
        rows(f"held by {name}", counts.items())


def rows(title: str, values: Iterable[tuple[str, float]]) -> None:
    """A table of two columns."""
    typer.echo(f"\n{title}")
    for name, value in values:
        typer.echo(f"{value:>12,.10g}  {name}")


if __name__ == "__main__":
    typer.run(main)
