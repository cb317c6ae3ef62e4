"""The ablation as a picture: tokens per round of every combination, and how deep each source alone is accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from coppice.lab.bench.ablation.variants import PLANNER, SOURCES
from coppice.lab.bench.plot import DPI, FIGURE_INCHES, GROUP_WIDTH, draw_depth
from coppice.lab.bench.summary import OFF, ON
from coppice.picture import save

Row = Mapping[str, Any]


def plot_ablation(report: Mapping[str, Any], path: Path) -> None:
    """Draw the report of an ablation."""
    rows = [
        {**row, "contender": row["contender"].removeprefix(f"{ON} ")}
        for row in report["rows"]
        if row["contender"] != OFF
    ]
    figure, (tau, depth) = plt.subplots(1, 2, figsize=FIGURE_INCHES, dpi=DPI)
    _draw_tau(tau, rows)
    sources = [row for row in rows if row["group"] == SOURCES and row["contender"] != PLANNER]
    alone = [row for row in sources if "+" not in row["contender"]]
    draw_depth(depth, [{**row, "name": f"{row['contender']} T={row['temperature']:g}"} for row in alone])
    figure.tight_layout()
    save(figure, path)


def _draw_tau(axes: Axes, rows: Sequence[Row]) -> None:
    """A group of bars for each variant of each group, a bar for each temperature."""
    variants = list(dict.fromkeys((row["group"], row["contender"]) for row in rows))
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    width = GROUP_WIDTH / len(temperatures)
    for at, temperature in enumerate(temperatures):
        bars = [row for row in rows if row["temperature"] == temperature]
        places = [variants.index((row["group"], row["contender"])) + (at + 0.5) * width for row in bars]
        axes.bar(places, [row["mean_acceptance_length"] for row in bars], width, label=f"T={temperature:g}")
    axes.axhline(1, color="gray", linestyle="--", linewidth=1)
    ticks = [place + GROUP_WIDTH / 2 for place in range(len(variants))]
    axes.set_xticks(ticks, [f"{group}: {name}" for group, name in variants], rotation=60, ha="right", fontsize=6)
    axes.set(ylabel="tokens per round", title="τ")
    axes.legend(fontsize="small")
