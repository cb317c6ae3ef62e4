"""`python -m tests.attacks`: what a stranger can do to a good client; exit code 1 where a limit is broken."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from coppice.lab.bench.environment import describe_machine, describe_run
from tests.attacks.kinds import ATTACKS, chosen

RESULT = "attacks.json"


def main(
    attacks: Annotated[str, typer.Option(help="Names of attacks, separated by commas; empty: all.")] = "",
    seconds: Annotated[float, typer.Option(min=1.0, max=120.0, help="How long each attack lasts.")] = 5.0,
    out: Annotated[Path | None, typer.Option(help=f"Directory for {RESULT}.")] = None,
    attacker_address: Annotated[
        str, typer.Option(help="Where attackers connect from; the good client is 127.0.0.1.")
    ] = ("127.0.0.2"),
    tenant: Annotated[str, typer.Option(help="The good client's x-tenant-id; empty: it names none.")] = "",
    table: Annotated[
        Path | None, typer.Option(help=f"Print the table of such a {RESULT} in Markdown, and end.")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the attacks, and end.")] = False,
) -> None:
    """Attack a deployment on this machine; print a row for each attack."""
    if show_list:
        for attack in ATTACKS.values():
            typer.echo(f"{attack.name:28} {attack.what}")
        return
    if table is not None:
        typer.echo(markdown(json.loads(table.read_text())["rows"]))
        return
    try:
        wanted = chosen(attacks)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    logging.basicConfig(level=logging.CRITICAL)
    # Here, because it takes seconds to import.
    from tests.attacks.run import HEADER, Settings, attacked

    machine = describe_machine()
    settings = Settings(seconds, max(os.sched_getaffinity(0)), attacker_address, tenant)
    typer.echo(HEADER)
    rows = asyncio.run(attacked(wanted, settings, typer.echo))
    command = f"python -m tests.attacks {shlex.join(sys.argv[1:])}"
    result = {
        "rows": [asdict(row) for row in rows],
        "attacker_address": attacker_address,
        "tenant": tenant,
        **describe_run(machine),
        "command": command,
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / RESULT).write_text(json.dumps(result, indent=0) + "\n")
    broken = [row.name for row in rows if row.broken]
    typer.echo(f"{len(broken)} of {len(rows)} rows break a limit{': ' if broken else ''}{', '.join(broken)}")
    raise typer.Exit(bool(broken))


def markdown(rows: list[dict[str, Any]]) -> str:
    """Rows of a result as a Markdown table."""
    names = list(dict.fromkeys(name for row in rows for name in row["limit_mib"]))
    lines = [
        "| attack | requests | failed | p50 quiet, attack (ms) | p99 quiet, attack (ms) | ratio (limit) "
        f"| peak MiB: {', '.join(names)} | limit broken |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        quiet, attack = row["quiet"], row["attack"]
        cells = (
            f"`{row['name']}`",
            attack["requests"],
            sum(row["failed"].values()),
            f"{quiet['p50_ms']:.0f}, {attack['p50_ms']:.0f}",
            f"{quiet['p99_ms']:.0f}, {attack['p99_ms']:.0f}",
            f"{', '.join(f'{ratio:.2f}' for ratio in row['ratios'])} ({row['max_ratio']:g})",
            ", ".join(f"{row['peak_mib'][name]:.0f}" if name in row["peak_mib"] else "-" for name in names),
            "; ".join(row["broken"]) or "none",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
