"""The in-pass suite as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from coppice.lab.bench.group_tables import GroupTables, number

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


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        f"{row['temperature']:g}",
        f"{row['tokens_per_s']:.0f}",
        number(row["speed_over_off"], 2),
        number(row["mean_acceptance_length"], 2),
        number(row["rows_per_pass"], 1),
        number(row["rows_left_per_pass"], 1) if row["pruned_passes"] else "",
        number(row["ms_per_pass"], 2),
        f"{row['removed_share']:.0%}" if row["pruned_passes"] and row["removed_share"] is not None else "",
        f"{row['redraft_rounds']}/{row['rounds']}" if row["redraft_tokens"] else "",
        f"{row['num_identical']}/{row['num_requests']}",
    ]


TABLES = GroupTables(COLUMNS, _cells, beside="plain decoding")


def print_in_pass(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a table per group, the ratios and the remarks."""
    settings = report["settings"]
    sizes = (
        f"{settings['num_prompts']} prompts x {settings['max_tokens']} tokens x {settings['num_runs']} runs, "
        f"{settings['threads']} threads; left: rows behind the layer that prunes."
    )
    TABLES.show(report, sizes, console)
