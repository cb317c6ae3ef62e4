"""Pictures of a report, from a specification of their panels: one style for all suites."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from coppice.lab.bench.harness.tables import Label, Row, rows_of, text
from coppice.picture import save

Report: TypeAlias = Mapping[str, Any]
Drawing: TypeAlias = Callable[[Axes, Sequence[Row], "Panel"], None]

PANEL_INCHES = (5.5, 4.2)
DPI = 90
# What all bars of one category take of the space between two categories.
GROUP_WIDTH = 0.8
# More categories than this have small, steep labels.
MANY_CATEGORIES = 8


def lines(axes: Axes, rows: Sequence[Row], panel: Panel) -> None:
    """A line per series of the field `y` over the field `x`; of fields with commas between a line each."""
    for field_name, series in itertools.product(panel.y.split(","), _series(rows, panel)):
        group = [row for row in rows if text(panel.series, row) == series and row[field_name] is not None]
        times, values = [row[str(panel.x)] for row in group], [row[field_name] for row in group]
        axes.plot(times, values, marker="o", label=series or field_name)


def bars(axes: Axes, rows: Sequence[Row], panel: Panel) -> None:
    """A group of bars for each category `x`, a bar per series; from `y_min` to `y_max` where rows have these."""
    categories = list(dict.fromkeys(text(panel.x, row) for row in rows))
    every = _series(rows, panel)
    width = GROUP_WIDTH / max(len(every), 1)
    for at, series in enumerate(every):
        group = [row for row in rows if text(panel.series, row) == series]
        places = [categories.index(text(panel.x, row)) + (at - (len(every) - 1) / 2) * width for row in group]
        heights = [row[panel.y] or 0.0 for row in group]
        low, high = (
            [abs((row.get(f"{panel.y}_{end}") or height) - height) for row, height in zip(group, heights, strict=True)]
            for end in ("min", "max")
        )
        reach = [low, high] if any((*low, *high)) else None
        axes.bar(places, heights, width, yerr=reach, capsize=3, label=series)
    many = len(categories) > MANY_CATEGORIES
    axes.set_xticks(
        range(len(categories)), categories, rotation=60 if many else 20, ha="right", fontsize=6 if many else 8
    )


def stacked(axes: Axes, rows: Sequence[Row], panel: Panel) -> None:
    """A bar for each category `x`, made of the fields that `y` names, commas between, each without its `num_`."""
    names = [text(panel.x, row) for row in rows]
    bottoms = [0.0] * len(rows)
    for name in panel.y.split(","):
        heights = [float(row[name]) for row in rows]
        axes.bar(names, heights, bottom=bottoms, label=name.removeprefix("num_"))
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]


def depths(axes: Axes, rows: Sequence[Row], panel: Panel) -> None:
    """A line per row of the list `y`, whose first entry is that of depth 1."""
    for row in rows:
        if shares := row[panel.y]:
            axes.plot(range(1, len(shares) + 1), shares, marker="o", label=text(panel.series, row))


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes: which rows, which fields of them, and how they are drawn.

    `x` is a field of lines and a template of bars' categories; `series` a template. Axes have the fields' names unless
    they have labels. With `by` there is a panel for each value of that field. `custom` draws the report by itself.
    """

    title: str
    y: str = ""
    x: Label = ""
    series: Label = ""
    drawing: Drawing = lines
    where: Callable[[Row], bool] = field(default=lambda row: True)
    by: str = ""
    xlabel: str = ""
    ylabel: str = ""
    log_x: bool = False
    log_y: bool = False
    # A dashed line at 1, what all are compared with.
    has_base: bool = False
    source: str = "rows"
    custom: Callable[[Axes, Report], None] | None = None


def draw(report: Report, panels: Sequence[Panel], path: Path, per_row: int = 3) -> None:
    """Draw a report as a PNG file, at most `per_row` panels next to each other."""
    drawn = [one for panel in panels for one in _panels(report, panel)]
    columns = min(per_row, len(drawn))
    height = -(-len(drawn) // columns)
    figure, grid = plt.subplots(
        height, columns, figsize=(columns * PANEL_INCHES[0], height * PANEL_INCHES[1]), dpi=DPI, squeeze=False
    )
    for axes in grid.flat[len(drawn) :]:
        axes.set_visible(False)
    for axes, (panel, title, rows) in zip(grid.flat, drawn, strict=False):
        _draw(axes, report, panel, title, rows)
    figure.tight_layout()
    save(figure, path)


def _panels(report: Report, panel: Panel) -> Iterator[tuple[Panel, str, list[Row]]]:
    rows = [row for row in rows_of(report, panel.source) if panel.where(row)]
    if not panel.by:
        yield panel, panel.title, rows
    for value in dict.fromkeys(row[panel.by] for row in rows) if panel.by else ():
        yield panel, panel.title.format(value), [row for row in rows if row[panel.by] == value]


def _draw(axes: Axes, report: Report, panel: Panel, title: str, rows: Sequence[Row]) -> None:
    xlabel = panel.x if panel.drawing is lines and isinstance(panel.x, str) else ""
    axes.set(
        xlabel=panel.xlabel or xlabel.replace("_", " "), ylabel=panel.ylabel or panel.y.replace("_", " "), title=title
    )
    if panel.custom is not None:
        panel.custom(axes, report)
    else:
        panel.drawing(axes, rows, panel)
    if panel.has_base:
        axes.axhline(1, color="gray", linestyle="--", linewidth=1)
    if panel.log_x:
        axes.set_xscale("log", base=2)
    if panel.log_y:
        axes.set_yscale("log")
    elif panel.custom is None:
        axes.set_ylim(bottom=0)
    if panel.custom is None and axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small")


def _series(rows: Sequence[Row], panel: Panel) -> list[str]:
    return list(dict.fromkeys(text(panel.series, row) for row in rows))
