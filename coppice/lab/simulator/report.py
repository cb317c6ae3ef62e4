"""Answers as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from coppice.lab.simulator.validation import ERROR

MIN_WIDTH = 140

# Of a comparison: heading, name and digits. An error in one of them tells where tokens per second come from.
FIGURES = (
    ("τ", "mean_acceptance_length", 2),
    ("rows/pass", "rows_per_pass", 0),
    ("passes/s", "passes_per_s", 1),
    ("pass ms", "pass_ms", 1),
    ("drafted rounds", "drafted_share", 2),
    ("drafts/s", "drafts_per_s", 0),
)

Row = Mapping[str, Any]


def print_answers(rows: Sequence[Row], console: Console | None = None) -> None:
    """A line per load and policy."""
    table = Table(title="Simulated: milliseconds are p50 / p99")
    headings = ("tokens/s", "TTFT ms", "ms per token", "rows per pass", "τ", "drafters busy", "drafters needed")
    table.add_column("load", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["load"],
            row["policy"],
            f"{row['tokens_per_s']:.0f}",
            f"{_number(row['ttft_ms_p50'], 0)} / {_number(row['ttft_ms_p99'], 0)}",
            f"{_number(row['tpot_ms_p50'])} / {_number(row['tpot_ms_p99'])}",
            _number(row["rows_per_pass"]),
            _number(row["mean_acceptance_length"], 2),
            _number(row["drafters_busy"], 2),
            "-" if row["drafters_needed"] is None else str(row["drafters_needed"]),
        )
    _print(table, console)


def print_comparison(rows: Sequence[Row], ratios: Mapping[str, float], console: Console | None = None) -> None:
    """A line per measured row, and the errors."""
    table = Table(title="Measured → simulated")
    table.add_column("load", no_wrap=True)
    for heading in ("tokens/s", "simulated/measured", *(heading for heading, _, _ in FIGURES)):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row['name']} (fitted)" if row["is_fitted"] else row["name"],
            f"{row['measured_tokens_per_s']:.0f} → {row['tokens_per_s']:.0f}",
            f"{row['simulated/measured']:.3f}",
            *(_pair(row, name, digits) for _, name, digits in FIGURES),
        )
    _print(table, console)
    if ratios:
        text = f"Absolute relative error: median {ratios[ERROR]:.1%}, largest {ratios[f'{ERROR}.max']:.1%}"
        (console or Console()).print(text, markup=False)


def _print(table: Table, console: Console | None) -> None:
    console = console or Console()
    console.width = max(console.width, MIN_WIDTH)
    console.print(table)


def _pair(row: Row, name: str, digits: int) -> str:
    return f"{_number(row[f'measured_{name}'], digits)} → {_number(row[name], digits)}"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
