"""Tables of a report on the terminal, from the names of their columns."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import rich.table
from rich.console import Console

Row: TypeAlias = Mapping[str, Any]
# A function of a row, or a template over its fields in which None shows as a dash.
Label: TypeAlias = Callable[[Row], str] | str

# Without a terminal rich assumes 80 columns, which would break every row of a log file.
MIN_WIDTH = 160


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of a report: a line each, named by `label`, with the fields that `columns` names, spaces between.

    With `across` it has a line for each value of `label` and, for each value of that field, every column in one cell.
    With `by` there is a table for each value of that field. Without rows there is none.
    """

    title: str
    columns: str
    label: Label = "{name}"
    where: Callable[[Row], bool] = field(default=lambda row: True)
    across: str = ""
    by: str = ""
    # The list of the report that its rows are in, or the mapping from their names.
    source: str = "rows"


def rows_of(report: Mapping[str, Any], source: str) -> list[Row]:
    """Rows in a list of a report, or in a mapping from their names; none where it has neither."""
    found = report.get(source, ())
    return list(found.values() if isinstance(found, Mapping) else found)


def cell(value: Any, missing: str = "-") -> str:
    """A value for people: numbers with four digits, lists and mappings entry by entry."""
    match value:
        case None:
            return missing
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
        case Mapping():
            return " ".join(f"{name}={'/'.join(map(cell, _values(item)))}" for name, item in value.items())
        case list() | tuple():
            return " ".join(map(cell, value))
        case _:
            return str(value)


def text(label: Label, row: Row) -> str:
    """The text of a template, or a function, for a row."""
    return _TEXTS.vformat(label, (), row) if isinstance(label, str) else label(row)


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
    rows = [row for row in rows_of(report, table.source) if table.where(row)]
    title, names = text(table.title, report["settings"]), table.columns.split()
    headings = [name.replace("_", " ") for name in names]
    if table.across:
        title = f"{title}: {' · '.join(headings)}"
    for group in dict.fromkeys(row[table.by] if table.by else "" for row in rows):
        taken = [row for row in rows if not table.by or row[table.by] == group]
        drawn = rich.table.Table(title=f"{group}: {title}" if group else title)
        drawn.add_column("", no_wrap=True)
        across = list(dict.fromkeys(row[table.across] for row in taken)) if table.across else []
        for heading in across or headings:
            drawn.add_column(str(heading), justify="right", overflow="fold")
        for label in dict.fromkeys(text(table.label, row) for row in taken):
            same = [row for row in taken if text(table.label, row) == label]
            if across:
                by_value = {row[table.across]: " · ".join(_figures(names, row)) for row in same}
                drawn.add_row(label, *[by_value.get(value, "") for value in across])
            for row in () if across else same:
                drawn.add_row(label, *_figures(names, row))
        yield drawn


def _figures(names: Sequence[str], row: Row) -> Iterator[str]:
    """Fields of a row, with the least and the most of one run where they differ."""
    for name in names:
        least, most = row.get(f"{name}_min"), row.get(f"{name}_max")
        yield cell(row.get(name)) + ("" if least == most else f" ({cell(least)} to {cell(most)})")


def _ratio_table(report: Mapping[str, Any], title: str) -> rich.table.Table:
    """A line per ratio: its median, and the least and most of one run where that is known."""
    drawn = rich.table.Table(title=title)
    for name in ("ratio", "median", "min", "max"):
        drawn.add_column(name, justify="left" if name == "ratio" else "right", no_wrap=True)
    for name, value in report["ratios"].items():
        least_most = report["ratio_spread"].get(name, ())
        drawn.add_row(name, *[f"{one:.3f}" for one in (value, *least_most)])
    return drawn


def _values(item: Any) -> Iterable[Any]:
    return item.values() if isinstance(item, Mapping) else [item]


class _Texts(string.Formatter):
    """Templates over rows: a field that is None, or that the row lacks, shows as a dash."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs.get(str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        return "-" if value is None else str(super().format_field(value, format_spec))


_TEXTS = _Texts()
