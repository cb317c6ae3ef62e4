"""The overhead suite's result as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from coppice.lab.bench.overhead.suite import PEERS
from coppice.lab.bench.table import MIN_WIDTH


def print_overhead(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the planner's passes and the orchestrator's rounds."""
    console = console or Console()
    console.width = max(console.width, MIN_WIDTH)
    passes = Table(title=f"Planner: microseconds of CPU per pass, trees of {report['settings']['num_nodes']} nodes")
    for heading in ("requests", "sources", "median", "p90", "p99", "asked for drafts"):
        passes.add_column(heading, justify="right")
    rounds = Table(title="Orchestrator: microseconds per round, its peers answer at once")
    for heading in ("run", "inside p50 / p99", "outside p50 / p99", "CPU"):
        rounds.add_column(heading, justify="right", no_wrap=True)
    for peer in PEERS:
        rounds.add_column(f"{peer}: messages, bytes in + out", justify="right")
    for row in report["rows"]:
        if row["kind"] == "planner":
            times = [f"{row[name]:.0f}" for name in ("us_p50", "us_p90", "us_p99")]
            passes.add_row(str(row["requests"]), str(row["sources"]), *times, f"{row['asked_share']:.0%}")
        else:
            rounds.add_row(
                row["name"],
                f"{row['inside_us_p50']:.0f} / {row['inside_us_p99']:.0f}",
                f"{row['outside_us_p50']:.0f} / {row['outside_us_p99']:.0f}",
                f"{row['cpu_us_per_round']:.0f}",
                *[_traffic(row, ways) for ways in PEERS.values()],
            )
    console.print(passes)
    console.print(rounds)
    for text in report["notes"]:
        console.print(text, markup=False)


def _traffic(row: Mapping[str, Any], ways: tuple[str, str]) -> str:
    messages = sum(row["messages_per_round"][way] for way in ways)
    sizes = " + ".join(f"{row['bytes_per_round'][way]:.0f}" for way in ways)
    return f"{messages:.2f}, {sizes}"
