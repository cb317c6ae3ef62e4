"""The overload benchmark as a picture: latencies and fates by load, and latency over the time of one overload."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from coppice.lab.bench.plot import DPI, FIGURE_INCHES
from coppice.picture import save

FATES = ("completed", "refused", "left", "failed", "cut")


def plot_overload(report: Mapping[str, Any], path: Path) -> None:
    """Draw the report of an overload benchmark."""
    width, height = FIGURE_INCHES
    figure, panels = plt.subplots(2, 2, figsize=(width, 2 * height), dpi=DPI)
    rows = report["rows"]
    _draw_latency(panels[0][0], rows, "token", "Time per token of accepted requests")
    _draw_latency(panels[0][1], rows, "ttft", "Time to first token")
    _draw_fates(panels[1][0], rows)
    _draw_course(panels[1][1], report["course"])
    figure.tight_layout()
    save(figure, path)


def _draw_latency(axes: Axes, rows: list[Mapping[str, Any]], name: str, title: str) -> None:
    for percent in (50, 99):
        values = [row[f"{name}_ms_p{percent}"] or float("nan") for row in rows]
        axes.plot([row["name"] for row in rows], values, marker="o", label=f"p{percent}")
    axes.set(xlabel="load, of saturation", ylabel="ms", title=title)
    axes.set_ylim(bottom=0)
    axes.legend()


def _draw_fates(axes: Axes, rows: list[Mapping[str, Any]]) -> None:
    bottoms = [0.0] * len(rows)
    for fate in FATES:
        heights = [row[f"num_{fate}"] for row in rows]
        axes.bar([row["name"] for row in rows], heights, bottom=bottoms, label=fate)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set(xlabel="load, of saturation", ylabel="requests", title="What became of requests")
    axes.legend()


def _draw_course(axes: Axes, course: Mapping[str, Any]) -> None:
    """One point per accepted request; the line is where the overload ends."""
    axes.plot(course["at_s"], course["token_ms"], ".", markersize=4)
    axes.axvline(course["end_s"], linestyle=":", color="black")
    axes.set(xlabel="s, when the request came", ylabel="ms per token", title=f"During and after {course['load']}")
    axes.set_ylim(bottom=0)
