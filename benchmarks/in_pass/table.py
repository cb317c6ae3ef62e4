"""The in-pass suite as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.ratio_table import ratio_table
from benchmarks.summary import ON
from benchmarks.table import MIN_WIDTH

COLUMNS = (
    "T",
    "tokens/s",
    "x off",
    "τ",
    "rows/pass",
    "left",
    "ms/pass",
    "nodes removed",
    "re-draft rounds",
    "identical",
)


def print_in_pass(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a table per group, the ratios and the remarks."""
    console = console or Console()
    console.width = max(console.width, MIN_WIDTH)
    for group in dict.fromkeys(row["group"] for row in report["rows"]):
        console.print(_group_table(report, group))
    console.print(ratio_table(report["ratios"], report["ratio_spread"]))
    settings = report["settings"]
    console.print(
        f"{settings['num_prompts']} prompts x {settings['max_tokens']} tokens x {settings['num_runs']} runs, "
        f"{settings['threads']} threads; left: rows behind the layer that prunes.",
        markup=False,
    )
    for text in report["notes"]:
        console.print(text, markup=False)
    for text in report["mismatches"]:
        console.print(f"MISMATCH: {text}", style="bold red", markup=False)


def _group_table(report: Mapping[str, Any], group: str) -> Table:
    table = Table(title=f"{group}: in turn with plain decoding")
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
        f"{row['tokens_per_s']:.0f}",
        _number(row["speed_over_off"], 2),
        _number(row["mean_acceptance_length"], 2),
        _number(row["rows_per_pass"], 1),
        _number(row["rows_left_per_pass"], 1) if row["pruned_passes"] else "",
        _number(row["ms_per_pass"], 2),
        f"{row['removed_share']:.0%}" if row["pruned_passes"] and row["removed_share"] is not None else "",
        f"{row['redraft_rounds']}/{row['rounds']}" if row["redraft_tokens"] else "",
        f"{row['num_identical']}/{row['num_requests']}",
    ]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
