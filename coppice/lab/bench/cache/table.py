"""The cache benchmark as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from coppice.lab.bench.ratio_table import ratio_table
from coppice.lab.bench.table import MIN_WIDTH

Row = Mapping[str, Any]

COLUMNS = (
    "τ (min to max)",
    "τ behind the first",
    "TTFT p50 / p99 ms",
    "tokens/s",
    "cache nodes accepted / proposed",
    "reads",
    "hits",
    "prompt cached",
    "failed",
    "identical",
)


def print_cache(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the table of phases, the ratios and the remarks."""
    console = console or Console()
    console.width = max(console.width, MIN_WIDTH)
    console.print(_phase_table(report))
    console.print(ratio_table(report["ratios"], report["ratio_spread"]))
    console.print(_setting(report["settings"]), markup=False)
    for text in report["notes"]:
        console.print(text, markup=False)
    for text in report["mismatches"]:
        console.print(f"MISMATCH: {text}", style="bold red", markup=False)


def _phase_table(report: Mapping[str, Any]) -> Table:
    table = Table(title="One request at a time, phase by phase; reads and hits of the cache's store, over all runs")
    table.add_column("", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for row in report["rows"]:
        table.add_row(row["name"], *_cells(row))
    return table


def _cells(row: Row) -> list[str]:
    tau, least, most = (row[f"mean_acceptance_length{end}"] for end in ("", "_min", "_max"))
    return [
        f"{_number(tau, 2)} ({_number(least, 2)} to {_number(most, 2)})",
        _number(row["later_acceptance_length"], 2),
        f"{_number(row['ttft_ms_p50'], 0)} / {_number(row['ttft_ms_p99'], 0)}",
        _number(row["tokens_per_s"], 0),
        f"{row['cache_accepted']} / {row['cache_proposed']}",
        str(row["cache_reads"]),
        str(row["cache_hits"]),
        "-" if row["cached_prompt_share"] is None else f"{row['cached_prompt_share']:.0%}",
        str(row["num_failed"]),
        f"{row['num_identical']} / {row['num_requests']}",
    ]


def _setting(settings: Mapping[str, Any]) -> str:
    tokens = [prompt["tokens"] for prompt in settings["prompts"]]
    return (
        f"{settings['num_runs']} runs, {len(tokens)} prompts of {sum(tokens) / len(tokens):.0f} tokens on average, "
        f"outputs of {settings['max_tokens']}, {settings['threads']} threads."
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
