"""A suite whose rows come in groups, as tables on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

from coppice.lab.bench.ratio_table import ratio_table
from coppice.lab.bench.summary import ON
from coppice.lab.bench.table import MIN_WIDTH

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GroupTables:
    """`columns` behind each row's name, and what `cells` puts into them; `beside` is what all had their turn with."""

    columns: Sequence[str]
    cells: Callable[[Row], Sequence[str]]
    beside: str

    def show(self, report: Mapping[str, Any], sizes: str, console: Console | None = None) -> None:
        """Print a table per group, the ratios, a line that says how much was measured, and the remarks."""
        console = console or Console()
        console.width = max(console.width, MIN_WIDTH)
        for group in dict.fromkeys(row["group"] for row in report["rows"]):
            console.print(self._table(report, group))
        console.print(ratio_table(report["ratios"], report["ratio_spread"]))
        for text in (sizes, *report["notes"]):
            console.print(text, markup=False)
        for text in report["mismatches"]:
            console.print(f"MISMATCH: {text}", style="bold red", markup=False)

    def _table(self, report: Mapping[str, Any], group: str) -> Table:
        table = Table(title=f"{group}: in turn with {self.beside}")
        table.add_column("", no_wrap=True)
        for name in self.columns:
            table.add_column(name, justify="right", no_wrap=True)
        for row in report["rows"]:
            if row["group"] == group:
                table.add_row(row["contender"].removeprefix(f"{ON} "), *self.cells(row))
        return table


def number(value: float | None, digits: int) -> str:
    """A number with so many digits behind the point; nothing for None."""
    return "" if value is None else f"{value:.{digits}f}"
