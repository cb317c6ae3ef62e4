"""Results as pictures: tokens per second, acceptance by depth, time per pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from coppice.picture import save

FIGURE_INCHES = (11, 4.2)
DPI = 90
# What all bars of one contender take of the space between two contenders.
GROUP_WIDTH = 0.8


def plot_latency(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the latency benchmark's rows."""
    figure, (speed, depth) = plt.subplots(1, 2, figsize=FIGURE_INCHES, dpi=DPI)
    _draw_speed(speed, rows)
    draw_depth(depth, rows)
    figure.tight_layout()
    save(figure, path)


def plot_throughput(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw tokens per second against concurrency."""
    figure, axes = plt.subplots(figsize=(FIGURE_INCHES[0] / 2, FIGURE_INCHES[1]), dpi=DPI)
    for name in dict.fromkeys(row["contender"] for row in rows):
        group = [row for row in rows if row["contender"] == name]
        axes.plot([row["concurrency"] for row in group], [row["tokens_per_s"] for row in group], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens/s")
    axes.legend()
    figure.tight_layout()
    save(figure, path)


def plot_passes(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw time per pass against rows, for every context."""
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    figure, panels = plt.subplots(1, len(contexts), figsize=FIGURE_INCHES, dpi=DPI, sharey=True, squeeze=False)
    for axes, context in zip(panels[0], contexts, strict=True):
        group = [row for row in rows if row["context"] == context]
        sizes = [row["rows"] for row in group]
        for name in ("coppice", "transformers"):
            axes.plot(sizes, [row[f"{name}_ms"] for row in group], marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("rows")
        axes.set_title(f"{context} tokens before")
    panels[0][0].set_ylabel("ms per pass")
    panels[0][0].legend()
    figure.tight_layout()
    save(figure, path)


def _draw_speed(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    width = GROUP_WIDTH / len(temperatures)
    for offset, temperature in enumerate(temperatures):
        group = [row for row in rows if row["temperature"] == temperature]
        places = [contenders.index(row["contender"]) + offset * width for row in group]
        medians = [row["tokens_per_s"] for row in group]
        below = [row["tokens_per_s"] - row["tokens_per_s_min"] for row in group]
        above = [row["tokens_per_s_max"] - row["tokens_per_s"] for row in group]
        bars = axes.bar(places, medians, width, yerr=(below, above), capsize=3, label=f"T={temperature:g}")
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    middle = GROUP_WIDTH / 2 - width / 2
    axes.set_xticks([place + middle for place in range(len(contenders))])
    axes.set_xticklabels(contenders, rotation=20, ha="right")
    axes.set_ylabel("tokens/s")
    axes.set_title("One stream: median of runs, bars from min to max")
    axes.legend()


def draw_depth(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the acceptance by depth of every row that has one."""
    for row in rows:
        shares = row["acceptance_by_depth"]
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, marker="o", label=row["name"])
    axes.set_ylim(0, 1)
    axes.set_xlabel("depth in the tree")
    axes.set_ylabel("share of rounds")
    axes.set_title("Rounds that accepted this deep, of those drafted so deep")
    if axes.lines:
        axes.legend()
