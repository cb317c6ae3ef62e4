"""The load benchmark as tables on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from coppice.lab.bench.ratio_table import ratio_table
from coppice.lab.bench.table import MIN_WIDTH

Row = Mapping[str, Any]


def print_load(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a table for each part, the ratios and the remarks."""
    console = console or Console()
    console.width = max(console.width, MIN_WIDTH)
    settings, every = report["settings"], report["rows"]
    parts = {part: [row for row in every if row["part"] == part] for part in ("closed", "open", "step")}
    console.print(_pivot(parts["closed"], "Tokens per second, so many requests at once: median (min to max)", _speed))
    console.print(_pivot(parts["closed"], "Milliseconds: TTFT p50 / p99 · per token after it p50 / p99", _times))
    console.print(_pivot(parts["closed"], "Milliseconds between deltas p50 / p99 · tokens of a delta", _deltas))
    console.print(_pivot(parts["closed"], "Rows per pass · tokens per round · draft nodes per round", _rounds))
    if baselines := [row for row in every if row["part"] == "baseline"]:
        console.print(_baselines(baselines))
    if parts["open"]:
        limits = f"TTFT {settings['ttft_target_ms']:g} ms, {settings['tpot_target_ms']:g} ms per token"
        console.print(_pivot(parts["open"], f"Goodput, requests per second within {limits} (share of all)", _goodput))
        console.print(
            _pivot(parts["open"], "Milliseconds: TTFT p50 / p99 from the intended time · per token p50 / p99", _times)
        )
    if parts["step"]:
        title = f"1 to {settings['step']} requests at once and back: tokens/s before, at, after · s lost up, down"
        console.print(_pivot(parts["step"], f"{title} · fewest tokens/s over 2 s", _step))
    console.print(ratio_table(report["ratios"], report["ratio_spread"], "; settle times in seconds"))
    console.print(_setting(settings), markup=False)
    for text in report["notes"]:
        console.print(text, markup=False)
    for text in report["mismatches"]:
        console.print(f"MISMATCH: {text}", style="bold red", markup=False)


def _pivot(rows: Sequence[Row], title: str, cell: Callable[[Row], str]) -> Table:
    """A line per load and a column per policy."""
    table = Table(title=title)
    table.add_column("load", no_wrap=True)
    names = list(dict.fromkeys(row["policy"] for row in rows))
    for name in names:
        table.add_column(name, justify="right")
    for load in dict.fromkeys(row["load"] for row in rows):
        group = {row["policy"]: row for row in rows if row["load"] == load}
        table.add_row(load, *[cell(group[name]) for name in names])
    return table


def _baselines(rows: Sequence[Row]) -> Table:
    table = Table(
        title="Tokens per second of transformers by itself, one batch of as many requests: median (min to max)"
    )
    for name in ("contender", "requests", "tokens/s", "outputs as ours"):
        table.add_column(name, justify="left" if name == "contender" else "right")
    for row in rows:
        same = f"{row['num_identical_to_off']} of {row['num_requests']}"
        table.add_row(row["contender"], str(row["concurrency"]), _speed(row), same)
    return table


def _speed(row: Row) -> str:
    return f"{row['tokens_per_s']:.0f} ({row['tokens_per_s_min']:.0f} to {row['tokens_per_s_max']:.0f})"


def _times(row: Row) -> str:
    return f"{_pair(row, 'ttft', 0)} · {_pair(row, 'tpot')}"


def _deltas(row: Row) -> str:
    return f"{_pair(row, 'itl')} · {_number(row['tokens_per_delta'], 2)}"


def _rounds(row: Row) -> str:
    names = ("rows_per_pass", "mean_acceptance_length", "nodes_per_round")
    return " · ".join(_number(row[name], 2) for name in names)


def _goodput(row: Row) -> str:
    return f"{row['goodput_per_s']:.2f} ({_number(row['good_share'], 2)})"


def _step(row: Row) -> str:
    speeds = " ".join(f"{row[f'tokens_per_s_{name}']:.0f}" for name in ("before", "at", "after"))
    times = ", ".join(_number(row[f"lost_{name}_s"], 2) for name in ("up", "down"))
    return f"{speeds} · {times} · {_number(row['lowest_tokens_per_s_at'], 0)}"


def _pair(row: Row, name: str, digits: int = 1) -> str:
    return " / ".join(_number(row[f"{name}_ms_p{percent}"], digits) for percent in (50, 99))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _setting(settings: Mapping[str, Any]) -> str:
    shortest, longest = settings["output_tokens"]
    return (
        f"{settings['num_runs']} runs of {settings['duration_s']:g} s windows, {settings['num_prompts']} prompts of "
        f"{settings['mean_prompt_tokens']:.0f} tokens on average, outputs of {shortest} to {longest}, "
        f"T={settings['temperature']:g}, {settings['threads']} threads. Without speculation the server gives at most "
        f"{settings['saturation_tokens_per_s']:.0f} tokens/s, {settings['saturation_requests_per_s']:.2f} requests/s, "
        f"with {settings['saturation_concurrency']} at once."
    )
