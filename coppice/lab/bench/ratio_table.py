"""Ratios within a run as a table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table


def ratio_table(ratios: Mapping[str, float], spread: Mapping[str, Sequence[float]], note: str = "") -> Table:
    """A line per ratio: its median, and the smallest and largest over the runs."""
    table = Table(title=f"Ratios within a run, over runs{note}")
    for name in ("ratio", "median", "min", "max"):
        table.add_column(name, justify="left" if name == "ratio" else "right", no_wrap=True)
    for name, value in ratios.items():
        lowest, highest = spread[name]
        table.add_row(name, f"{value:.3f}", f"{lowest:.3f}", f"{highest:.3f}")
    return table
