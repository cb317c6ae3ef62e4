"""The result as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from coppice.lab.bench.ratio_table import ratio_table

# Without a terminal rich assumes 80 columns, which would break every row of a log file.
MIN_WIDTH = 140
MAX_DEPTHS_SHOWN = 6
MAX_PASS_SIZES_SHOWN = 6


def print_report(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print rows, time per pass, ratios and remarks."""
    console = console or Console()
    console.width = max(console.width, MIN_WIDTH)
    console.print(_speed_table(report["rows"]))
    console.print(_pass_table(report["rows"]))
    console.print(ratio_table(report["ratios"], report["ratio_spread"]))
    for text in [_setting(report), *report["notes"], *_divergence_lines(report["divergences"])]:
        console.print(text, markup=False)
    for text in report["mismatches"]:
        console.print(f"MISMATCH: {text}", style="bold red", markup=False)


def print_throughput(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print tokens per second, a line per contender and a column per concurrency, and the ratios."""
    console = console or Console()
    console.width = max(console.width, MIN_WIDTH)
    rows = report["rows"]
    levels = list(dict.fromkeys(row["concurrency"] for row in rows))
    table = Table(title="Tokens per second of so many requests at once: median (min to max)")
    table.add_column("contender", no_wrap=True)
    for level in levels:
        table.add_column(f"x{level}", justify="right")
    for name in dict.fromkeys(row["contender"] for row in rows):
        group = {row["concurrency"]: row for row in rows if row["contender"] == name}
        cells = [
            f"{group[level]['tokens_per_s']:.0f} "
            f"({group[level]['tokens_per_s_min']:.0f} to {group[level]['tokens_per_s_max']:.0f})"
            for level in levels
        ]
        table.add_row(name, *cells)
    console.print(table)
    ratios = Table(title="Ratios within a run, median over runs")
    ratios.add_column("ratio", no_wrap=True)
    for level in levels:
        ratios.add_column(f"x{level}", justify="right")
    for name in dict.fromkeys(key.rpartition(".x")[0] for key in report["ratios"]):
        ratios.add_row(name, *[f"{report['ratios'][f'{name}.x{level}']:.2f}" for level in levels])
    console.print(ratios)
    settings = report["settings"]
    console.print(
        f"{settings['max_tokens']} tokens each behind {settings['mean_prompt_tokens']:.0f} on average, "
        f"{settings['num_runs']} runs, {settings['threads']} threads, T=0; the time of prompts is in it.",
        markup=False,
    )
    for text in report["notes"]:
        console.print(text, markup=False)
    for text in report["mismatches"]:
        console.print(f"MISMATCH: {text}", style="bold red", markup=False)


def print_passes(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the times of passes, a line per number of rows and a pair of columns per context."""
    console = console or Console()
    console.width = max(console.width, MIN_WIDTH)
    contexts = list(dict.fromkeys(row["context"] for row in report["rows"]))
    has_fast = any(row["fast_ms"] is not None for row in report["rows"])
    modes = "strict / fast / transformers (strict:transformers, strict:fast)" if has_fast else "ours / transformers"
    table = Table(title="Milliseconds per pass: ours over a tree, transformers' over a chain (ratio of two in turn)")
    table.add_column("rows", justify="right")
    for context in contexts:
        table.add_column(f"{context} tokens before: {modes}", justify="right")
    for size in dict.fromkeys(row["rows"] for row in report["rows"]):
        cells = [_pass_cell(row) for row in report["rows"] if row["rows"] == size]
        table.add_row(str(size), *cells)
    console.print(table)
    for context, slope in report["ms_per_further_row"].items():
        if slope:
            console.print(
                f"A further row behind {context} tokens: {slope['coppice']:.3f} ms, transformers "
                f"{slope['transformers']:.3f} ms."
            )
    for text in report["notes"]:
        console.print(text, markup=False)


def _pass_cell(row: Mapping[str, Any]) -> str:
    ours, theirs, ratio = f"{row['coppice_ms']:.2f}", f"{row['transformers_ms']:.2f}", f"{row['ratio']:.2f}"
    if row["fast_ms"] is None:
        return f"{ours} / {theirs} ({ratio})"
    return f"{ours} / {row['fast_ms']:.2f} / {theirs} ({ratio}, {row['strict_over_fast']:.2f})"


def _speed_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Tokens per second, median of the runs (4-grams: share that is repeated in its output)")
    table.add_column("contender", no_wrap=True)
    for name in (
        "tokens/s",
        "min to max",
        "x off",
        "τ",
        "forward",
        "linger",
        "ttft ms",
        "identical to",
        "rep. 4-grams",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['tokens_per_s_min']:.1f} to {row['tokens_per_s_max']:.1f}",
            "" if row["speed_over_off"] is None else f"{row['speed_over_off']:.2f}",
            f"{row['mean_acceptance_length']:.2f}",
            f"{row['forward_share']:.0%}",
            f"{row['linger_share']:.0%}",
            f"{row['ttft_ms']:.1f}",
            _identical(row),
            f"{row['repeated_4grams']:.0%}",
        )
    return table


def _identical(row: Mapping[str, Any]) -> str:
    if row["identical_to"] is None:
        return ""
    return f"{row['identical_to']} {row['num_identical']}/{row['num_prompts']}"


def _pass_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Milliseconds per pass of the target by rows, most frequent sizes (x = passes)")
    table.add_column("contender", no_wrap=True)
    table.add_column("rows: ms x passes")
    table.add_column("accepted at depth 1, 2, …")
    for row in rows:
        passes = row["ms_per_pass_by_rows"]
        frequent = sorted(passes, key=lambda rows: -passes[rows]["count"])[:MAX_PASS_SIZES_SHOWN]
        cells = [
            f"{size}: {passes[size]['mean_ms']:.2f} x {passes[size]['count']}" for size in sorted(frequent, key=int)
        ]
        depths = row["acceptance_by_depth"][:MAX_DEPTHS_SHOWN]
        table.add_row(row["name"], "   ".join(cells), " ".join(f"{share:.2f}" for share in depths))
    return table


def _setting(report: Mapping[str, Any]) -> str:
    settings, machine = report["settings"], report["machine"]
    return (
        f"{len(settings['prompts'])} prompts x {settings['max_tokens']} tokens x {settings['num_runs']} runs, "
        f"{settings['threads']} threads; {machine['cpu']}, {machine['usable_cores']} cores, load average at the "
        f"start {machine['load_average_1m']:.2f}. Plain ratios are T=0, those at other temperatures say so."
    )


def _divergence_lines(divergences: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{item['contender']} leaves transformers generate on prompt {item['prompt'] + 1} at token "
        f"{item['position']}: {item['token_id']} instead of {item['transformers_token_id']}; the two best "
        f"logits are {item['top_2_gap']:.2e} apart{' (a near tie)' if item['near_tie'] else ''}"
        for item in divergences
    ]
