"""The timeline's result as a table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from coppice.lab.bench.table import MIN_WIDTH


def print_timeline(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print hops and ratios."""
    console = console or Console()
    console.width = max(console.width, MIN_WIDTH)
    hops = Table(title="One round, hop by hop: microseconds")
    for heading in ("hop", "median", "p90", "rounds"):
        hops.add_column(heading, justify="left" if heading == "hop" else "right")
    for row in report["rows"]:
        times = [f"{row[name]:.0f}" if name in row else "-" for name in ("us_p50", "us_p90")]
        hops.add_row(row["name"], *times, str(row["rounds"]))
    console.print(hops)
    console.print(", ".join(f"{name} {value:.3f}" for name, value in report["ratios"].items()))
    for text in report["notes"]:
        console.print(text, markup=False)
