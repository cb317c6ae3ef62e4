"""Tables of a report on the terminal, from a specification of their columns."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import rich.table
from rich.console import Console

Row: TypeAlias = Mapping[str, Any]
# A function of a row, or a template over its fields in which None shows as a dash.
Cell: TypeAlias = Callable[[Row], str] | str

# Without a terminal rich assumes 80 columns, which would break every row of a log file.
MIN_WIDTH = 140


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of a report: a line each, named by `label`, with `columns` from heading to cell.

    With `across` it has a line for each value of `label` and, for each value of that field, every column in one cell.
    With `by` there is a table for each value of that field. Without rows there is none.
    """

    title: str
    columns: Mapping[str, Cell]
    label: Cell = "{name}"
    where: Callable[[Row], bool] = field(default=lambda row: True)
    across: str = ""
    by: str = ""
    # The list of the report that its rows are in.
    source: str = "rows"


def text(cell: Cell, row: Row) -> str:
    """A cell's text for a row."""
    return _TEXTS.vformat(cell, (), row) if isinstance(cell, str) else cell(row)


def print_tables(report: Mapping[str, Any], tables: Iterable[Table], line: str, ratio_title: str) -> None:
    """Print tables, named ratios, `line`, remarks and mismatches."""
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    for table in tables:
        for drawn in _tables(report, table):
            console.print(drawn)
    if ratio_title and report["ratios"]:
        console.print(_ratio_table(report, ratio_title))
    for one in [*([text(line, report["settings"])] if line else []), *report["notes"]]:
        console.print(one, markup=False)
    for one in report["mismatches"]:
        console.print(f"MISMATCH: {one}", style="bold red", markup=False)


def _tables(report: Mapping[str, Any], table: Table) -> Iterator[rich.table.Table]:
    rows = [row for row in report.get(table.source, ()) if table.where(row)]
    title = text(table.title, report["settings"])
    groups = dict.fromkeys(row[table.by] for row in rows) if table.by else [None]
    for group in groups if rows else ():
        taken = [row for row in rows if not table.by or row[table.by] == group]
        drawn = rich.table.Table(title=title if group is None else f"{group}: {title}")
        drawn.add_column("", no_wrap=True)
        if table.across:
            _add_pivot(drawn, table, taken)
        else:
            for heading in table.columns:
                drawn.add_column(heading, justify="right")
            for row in taken:
                drawn.add_row(text(table.label, row), *[text(cell, row) for cell in table.columns.values()])
        yield drawn


def _add_pivot(drawn: rich.table.Table, table: Table, rows: Sequence[Row]) -> None:
    headings = list(dict.fromkeys(row[table.across] for row in rows))
    for heading in headings:
        drawn.add_column(f"{heading}: " + " · ".join(table.columns), justify="right")
    for label in dict.fromkeys(text(table.label, row) for row in rows):
        group = {row[table.across]: row for row in rows if text(table.label, row) == label}
        cells = [
            " · ".join(text(cell, group[heading]) for cell in table.columns.values()) if heading in group else ""
            for heading in headings
        ]
        drawn.add_row(label, *cells)


def _ratio_table(report: Mapping[str, Any], title: str) -> rich.table.Table:
    """A line per ratio: its median, and the least and most of one run where that is known."""
    drawn = rich.table.Table(title=title)
    for name in ("ratio", "median", "min", "max"):
        drawn.add_column(name, justify="left" if name == "ratio" else "right", no_wrap=True)
    for name, value in report["ratios"].items():
        least_most = report["ratio_spread"].get(name, ())
        drawn.add_row(name, *[f"{one:.3f}" for one in (value, *least_most)])
    return drawn


class _Texts(string.Formatter):
    """Templates over rows: a field that is None, or that the row lacks, shows as a dash."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs.get(str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        return "-" if value is None else str(super().format_field(value, format_spec))


_TEXTS = _Texts()
