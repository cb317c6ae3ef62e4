"""The ablation as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.ratio_table import ratio_table
from benchmarks.summary import ON
from benchmarks.table import MAX_DEPTHS_SHOWN, MIN_WIDTH

COLUMNS = ("T", "τ", "nodes", "tokens/s", "x off", "draft ms", "calibration error", "accepted at depth 1, 2, …", "same")


def print_ablation(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a table per group, the ratios and the remarks."""
    console = console or Console()
    console.width = max(console.width, MIN_WIDTH)
    for group in dict.fromkeys(row["group"] for row in report["rows"]):
        console.print(_group_table(report, group))
    console.print(ratio_table(report["ratios"], report["ratio_spread"]))
    settings = report["settings"]
    console.print(
        f"{len(settings['prompts'])} prompts x {settings['max_tokens']} tokens x {settings['num_runs']} runs, "
        f"{settings['threads']} threads, {settings['rounds']} rounds; trees and chains of {settings['num_nodes']} "
        "nodes.",
        markup=False,
    )
    for text in report["notes"]:
        console.print(text, markup=False)
    for text in report["mismatches"]:
        console.print(f"MISMATCH: {text}", style="bold red", markup=False)


def _group_table(report: Mapping[str, Any], group: str) -> Table:
    table = Table(title=f"{group}: in turn with speculation off")
    table.add_column("", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in report["rows"]:
        if row["group"] == group:
            table.add_row(row["contender"].removeprefix(f"{ON} "), *_cells(row))
    return table


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        f"{row['temperature']:g}",
        f"{row['mean_acceptance_length']:.2f}",
        _number(row["nodes_per_round"], 1),
        f"{row['tokens_per_s']:.0f}",
        _number(row["speed_over_off"], 2),
        _number(row["draft_ms"], 2),
        _number(row["calibration_error"], 3),
        " ".join(f"{share:.2f}" for share in row["acceptance_by_depth"][:MAX_DEPTHS_SHOWN]),
        "" if row["identical"] is None else f"{row['num_identical']}/{row['num_prompts']}",
    ]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
