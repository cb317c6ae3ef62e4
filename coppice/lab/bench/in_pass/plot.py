"""The in-pass suite as a picture: speed over plain decoding of every drafting variant, and times of passes by batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from coppice.lab.bench.in_pass.variants import DRAFTING
from coppice.lab.bench.plot import DPI, FIGURE_INCHES, GROUP_WIDTH
from coppice.lab.bench.summary import OFF, ON
from coppice.picture import save

Row = Mapping[str, Any]


def plot_in_pass(report: Mapping[str, Any], path: Path) -> None:
    """Draw the report of the in-pass suite."""
    rows = [
        {**row, "contender": row["contender"].removeprefix(f"{ON} ")}
        for row in report["rows"]
        if row["contender"] != OFF
    ]
    figure, (speed, passes) = plt.subplots(1, 2, figsize=FIGURE_INCHES, dpi=DPI)
    _draw_bars(speed, [row for row in rows if row["group"] == DRAFTING], "speed_over_off")
    speed.axhline(1, color="gray", linestyle="--", linewidth=1)
    speed.set(ylabel="tokens/s over plain decoding", title="One request")
    most = max(row["batch_size"] for row in rows)
    pruning = [row for row in rows if row["max_nodes"] and row["batch_size"] == most]
    _draw_bars(passes, pruning, "ms_per_pass")
    title = f"Early pruning, {most} requests at once" if pruning else "Early pruning: not measured"
    passes.set(ylabel="ms per pass", title=title)
    figure.tight_layout()
    save(figure, path)


def _draw_bars(axes: Axes, rows: Sequence[Row], field: str) -> None:
    """A group of bars for each contender, a bar for each temperature."""
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    width = GROUP_WIDTH / max(len(temperatures), 1)
    for at, temperature in enumerate(temperatures):
        bars = [row for row in rows if row["temperature"] == temperature]
        places = [contenders.index(row["contender"]) + (at + 0.5) * width for row in bars]
        axes.bar(places, [row[field] or 0.0 for row in bars], width, label=f"T={temperature:g}")
    ticks = [place + GROUP_WIDTH / 2 for place in range(len(contenders))]
    axes.set_xticks(ticks, contenders, rotation=60, ha="right", fontsize=6)
    if rows:
        axes.legend(fontsize="small")
