"""The load benchmark as a picture: speed by concurrency, goodput and waiting by rate, and the step over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from coppice.lab.bench.plot import DPI, FIGURE_INCHES
from coppice.picture import save

Row = Mapping[str, Any]


def plot_load(report: Mapping[str, Any], path: Path) -> None:
    """Draw the report of a load benchmark."""
    width, height = FIGURE_INCHES
    figure, panels = plt.subplots(2, 2, figsize=(width, 2 * height), dpi=DPI)
    closed = [row for row in report["rows"] if row["part"] == "closed"]
    poisson = [row for row in report["rows"] if row["part"] == "open" and row["rate"] is not None]
    _draw_lines(panels[0][0], closed, "concurrency", "tokens_per_s")
    panels[0][0].set_xscale("log", base=2)
    panels[0][0].set(xlabel="requests at once", ylabel="tokens/s", title="Closed loop: median of runs")
    _draw_lines(panels[0][1], poisson, "rate", "goodput_per_s")
    panels[0][1].set(xlabel="rate, of saturation without speculation", ylabel="requests/s", title="Goodput")
    _draw_lines(panels[1][0], poisson, "rate", "ttft_ms_p99")
    panels[1][0].set(xlabel="rate, of saturation without speculation", ylabel="ms", title="TTFT p99, open loop")
    _draw_step(panels[1][1], report["step_series"])
    figure.tight_layout()
    save(figure, path)


def _draw_lines(axes: Axes, rows: Sequence[Row], across: str, up: str) -> None:
    for name in dict.fromkeys(row["policy"] for row in rows):
        group = [row for row in rows if row["policy"] == name and row[up] is not None]
        axes.plot([row[across] for row in group], [row[up] for row in group], marker="o", label=name)
    axes.set_ylim(bottom=0)
    _add_legend(axes)


def _draw_step(axes: Axes, series: Sequence[Row]) -> None:
    """The first run of each policy; dotted, on the right, draft nodes per round."""
    nodes = axes.twinx()
    for item in [item for item in series if item["run"] == 0]:
        times = [item["bin_s"] * index for index in range(len(item["tokens_per_s"]))]
        [line] = axes.plot(times, item["tokens_per_s"], label=item["policy"], linewidth=1)
        drawn = [float("nan") if value is None else value for value in item["nodes_per_round"]]
        nodes.plot(times, drawn, color=line.get_color(), linestyle=":")
    axes.set(xlabel="s", ylabel="tokens/s in 250 ms", title="One request, many, one; dotted: draft nodes per round")
    axes.set_ylim(bottom=0)
    nodes.set_ylim(bottom=0)
    _add_legend(axes)


def _add_legend(axes: Axes) -> None:
    if axes.lines:
        axes.legend()
