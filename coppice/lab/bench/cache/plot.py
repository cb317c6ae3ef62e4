"""The cache benchmark as a picture: tokens per round and time to the first token, phase by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from coppice.lab.bench.cache.phases import OFF
from coppice.lab.bench.plot import DPI, FIGURE_INCHES, GROUP_WIDTH
from coppice.picture import save

Row = Mapping[str, Any]


def plot_cache(report: Mapping[str, Any], path: Path) -> None:
    """Draw the report of a cache benchmark."""
    figure, (tau, ttft) = plt.subplots(1, 2, figsize=FIGURE_INCHES, dpi=DPI)
    rows = [row for row in report["rows"] if row["phase"] != OFF]
    _draw_bars(tau, rows, "mean_acceptance_length")
    tau.set(ylabel="tokens per round", title="τ: median of runs")
    _draw_bars(ttft, rows, "ttft_ms_p50")
    ttft.set(ylabel="ms", title="Time to the first token: median")
    tau.legend(fontsize="small")
    figure.tight_layout()
    save(figure, path)


def _draw_bars(axes: Axes, rows: Sequence[Row], name: str) -> None:
    """A group of bars for each phase, a bar for each setting and temperature."""
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    series = list(dict.fromkeys((row["setting"], row["temperature"]) for row in rows))
    width = GROUP_WIDTH / len(series)
    for at, (setting, temperature) in enumerate(series):
        heights = {row["phase"]: row[name] for row in rows if (row["setting"], row["temperature"]) == series[at]}
        places = [group + (at - (len(series) - 1) / 2) * width for group in range(len(phases))]
        axes.bar(places, [heights[phase] or 0.0 for phase in phases], width, label=f"{setting} T={temperature:g}")
    axes.set_xticks(range(len(phases)), phases)
