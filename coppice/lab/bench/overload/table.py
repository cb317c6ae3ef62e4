"""The overload benchmark as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from coppice.lab.bench.overload.first_tokens import PARTS, SHARE
from coppice.lab.bench.table import MIN_WIDTH

COLUMNS = {
    "offered_per_s": "offered/s",
    "completed_per_s": "completed/s",
    "goodput_per_s": "goodput/s",
    "num_refused": "refused",
    "num_failed": "failed",
    "num_left": "left",
    "most_running": "most running",
    "most_waiting": "most waiting",
}
LATENCIES = {"ttft": "TTFT", "tpot": "ITL", "e2e": "end to end", "token": "per token"}


def print_overload(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print who got in, what they waited for, the ratios and the remarks."""
    console = console or Console()
    console.width = max(console.width, MIN_WIDTH)
    counts = Table(title="Requests by load, in multiples of what saturates the server")
    times = Table(title="Milliseconds of accepted requests, p50 / p99")
    for table, names in ((counts, COLUMNS.values()), (times, LATENCIES.values())):
        table.add_column("load")
        for name in names:
            table.add_column(name, justify="right")
    for row in report["rows"]:
        counts.add_row(row["name"], *[_number(row[name]) for name in COLUMNS])
        pairs = [[_number(row[f"{name}_ms_p{percent}"]) for percent in (50, 99)] for name in LATENCIES]
        times.add_row(row["name"], *[" / ".join(pair) for pair in pairs])
    console.print(counts)
    console.print(times)
    console.print(_slowest(report))
    console.print(_ratios(report))
    settings = report["settings"]
    console.print(
        f"Saturated by {settings['saturation_requests_per_s']:.2f} requests/s; "
        f"MAX_TOKEN_MS={settings['max_token_ms']:g} MAX_QUEUE_WAIT_S={settings['max_queue_wait_s']:g}; "
        f"{settings['num_runs']} runs of {settings['duration_s']:g} s.",
        markup=False,
    )
    for text in report["notes"]:
        console.print(text, markup=False)
    for text in report["mismatches"]:
        console.print(f"PROBLEM: {text}", style="bold red", markup=False)


def _slowest(report: Mapping[str, Any]) -> Table:
    table = Table(title=f"The slowest {100 * SHARE:g} % of first tokens: when they came, and where they waited")
    names = ("run", "at_s", "prompt_tokens", "ttft_ms", *(f"{part}_ms" for part in PARTS))
    for name in ("load", *names):
        table.add_column(name.removesuffix("_ms").replace("_", " "), justify="left" if name == "load" else "right")
    for one in report["slowest_first_tokens"]:
        table.add_row(one["name"], *[_number(one[name]) for name in names])
    return table


def _ratios(report: Mapping[str, Any]) -> Table:
    table = Table(title="Over all runs, and the least and most of one run; recovery in seconds")
    for name in ("figure", "value", "min", "max"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for name, (least, most) in report["ratio_spread"].items():
        table.add_row(name, *[f"{value:.3f}" for value in (report["ratios"][name], least, most)])
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.1f}"
