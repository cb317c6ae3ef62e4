"""The forms' rows as a table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from coppice.lab.bench.summary import OFF
from coppice.lab.bench.table import MIN_WIDTH

ORIGINS = ("fresh", "left_over", "rerooted", "ahead", "redraft")


def print_forms(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print what rounds of each form were like, beside plain decoding."""
    console = console or Console()
    console.width = max(console.width, MIN_WIDTH)
    table = Table(title="Forms: rounds (accepted tokens) by when their draft was made")
    table.add_column("contender", no_wrap=True)
    for heading in ("tokens/s", "x off", "τ", "forward", "bubble ms", "early", "hits", *ORIGINS):
        table.add_column(heading, justify="right", no_wrap=True)
    names = {OFF, *(form["contender"] for form in report["settings"]["forms"])}
    for row in report["rows"]:
        if row["contender"] in names:
            table.add_row(*_cells(row))
    console.print(table)


def _cells(row: Mapping[str, Any]) -> list[str]:
    origins = row.get("origins", {})
    counts = [origins.get(name, {"rounds": 0, "accepted": 0}) for name in ORIGINS]
    return [
        row["name"],
        f"{row['tokens_per_s']:.1f}",
        "" if row["speed_over_off"] is None else f"{row['speed_over_off']:.2f}",
        f"{row['mean_acceptance_length']:.2f}",
        f"{row['forward_share']:.0%}",
        f"{row['bubble_ms']:.2f}",
        f"{row['early_drafts']:.0%}",
        f"{row['draft_ahead_hits']:.0%}",
        *[f"{one['rounds']} ({one['accepted']})" for one in counts],
    ]
