"""Speed of each form against the delay between orchestrator and drafter, plain decoding being 1."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from coppice.lab.bench.plot import DPI, FIGURE_INCHES
from coppice.picture import save


def plot_forms(report: Mapping[str, Any], path: Path) -> None:
    """Draw a panel per temperature."""
    temperatures = list(dict.fromkeys(row["temperature"] for row in report["rows"]))
    figure, panels = plt.subplots(
        1, len(temperatures), figsize=FIGURE_INCHES, dpi=DPI, sharey=True, squeeze=False, layout="tight"
    )
    for axes, temperature in zip(panels[0], temperatures, strict=True):
        for form, points in lines(report, temperature).items():
            axes.plot([delay for delay, _ in points], [speed for _, speed in points], marker="o", label=form)
        _label(axes, temperature)
    panels[0][0].set_ylabel("tokens/s, plain decoding = 1")
    panels[0][0].legend()
    save(figure, path)


def lines(report: Mapping[str, Any], temperature: float) -> dict[str, list[tuple[int, float]]]:
    """By form: delays in milliseconds, and tokens/s over those of plain decoding."""
    speeds = {row["contender"]: row["speed_over_off"] for row in report["rows"] if row["temperature"] == temperature}
    found: dict[str, list[tuple[int, float]]] = {}
    for form in report["settings"]["forms"]:
        if (speed := speeds.get(form["contender"])) is not None:
            found.setdefault(form["form"], []).append((form["delay_ms"], speed))
    return {name: sorted(points) for name, points in found.items()}


def _label(axes: Axes, temperature: float) -> None:
    axes.axhline(1, color="gray", linestyle="--", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="ms more, each way, between orchestrator and drafter", title=f"One stream, T={temperature:g}")
