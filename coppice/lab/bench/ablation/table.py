"""The ablation as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from coppice.lab.bench.group_tables import GroupTables, number
from coppice.lab.bench.table import MAX_DEPTHS_SHOWN

COLUMNS = ("T", "τ", "nodes", "tokens/s", "x off", "draft ms", "calibration error", "accepted at depth 1, 2, …", "same")


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        f"{row['temperature']:g}",
        f"{row['mean_acceptance_length']:.2f}",
        number(row["nodes_per_round"], 1),
        f"{row['tokens_per_s']:.0f}",
        number(row["speed_over_off"], 2),
        number(row["draft_ms"], 2),
        number(row["calibration_error"], 3),
        " ".join(f"{share:.2f}" for share in row["acceptance_by_depth"][:MAX_DEPTHS_SHOWN]),
        "" if row["identical"] is None else f"{row['num_identical']}/{row['num_prompts']}",
    ]


TABLES = GroupTables(COLUMNS, _cells, beside="speculation off")


def print_ablation(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a table per group, the ratios and the remarks."""
    settings = report["settings"]
    sizes = (
        f"{len(settings['prompts'])} prompts x {settings['max_tokens']} tokens x {settings['num_runs']} runs, "
        f"{settings['threads']} threads, {settings['rounds']} rounds; at most {settings['num_nodes']} nodes "
        "a round."
    )
    if settings["repetition_penalty"] != 1:
        sizes += f" Repetition penalty {settings['repetition_penalty']:g}."
    TABLES.show(report, sizes, console)
