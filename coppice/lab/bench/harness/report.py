"""The result of a suite: a JSON document, a picture, tables on the terminal and, for some suites, an HTML page."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any, TypeAlias

from coppice.checkpoints.bundled import MODELS
from coppice.lab.bench.environment import describe_run
from coppice.lab.bench.harness.experiment import Ratios
from coppice.lab.bench.harness.plots import Panel, draw
from coppice.lab.bench.harness.tables import Table, print_tables

Row: TypeAlias = dict[str, Any]
Report: TypeAlias = dict[str, Any]

# Above this load per core something else was running; starting the services alone stays below.
BUSY_LOAD_PER_CORE = 0.75
# Of a report, what says where it comes from.
_ORIGIN = ("command", "commit", "settings", "machine", "versions")
_NO_RATIOS = Ratios({}, {})
_PAGE = Template(
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; }
table { border-collapse: collapse; display: block; font-size: 13px; overflow-x: auto; }
td, th { border-bottom: 1px solid #ccc; padding: .2em .7em; text-align: right; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
img { max-width: 100%; }
pre { background: #f4f4f4; overflow-x: auto; padding: 1em; }
.problem { color: #b00; font-weight: bold; }
</style>
</head>
<body>
<h1>$title</h1>
$remarks
<h2>Figures</h2>
$ratios
<p>$ratio_note</p>
<img alt="$title" src="data:image/png;base64,$picture">
<h2>All rows</h2>
$rows
<h2>How it was measured</h2>
<pre>$origin</pre>
</body>
</html>
"""
)


@dataclass(frozen=True, slots=True)
class Shown:
    """How a suite's report is shown: tables, a line that says how much was measured, panels of the picture.

    `line` is a template over the report's `settings`, as are the titles of tables.
    """

    tables: Sequence[Table]
    panels: Sequence[Panel] = ()
    line: str = ""
    panels_per_row: int = 3
    has_page: bool = False
    # Of the table of ratios; empty: ratios are not shown.
    ratio_title: str = field(default="Ratios within a run, over runs")


def document(
    suite: str,
    machine: Mapping[str, Any],
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    ratios: Ratios = _NO_RATIOS,
    ratio_note: str = "",
    notes: Iterable[str] = (),
    mismatches: Iterable[object] = (),
    **more: Any,
) -> Report:
    """What `SUITE.json` holds; `machine` is what `describe_machine` said before the first sample."""
    return {
        "suite": suite,
        "rows": [dict(row) for row in rows],
        "ratios": dict(ratios.values),
        "ratio_spread": dict(ratios.spread),
        "ratio_note": ratio_note,
        **more,
        "notes": [*notes, *machine_remarks(machine)],
        "mismatches": [str(one) for one in mismatches],
        "settings": dict(settings),
        **describe_run(machine),
    }


def unequal(rows: Iterable[Row], num_all: str = "num_requests", num_same: str = "num_identical") -> list[str]:
    """What breaks the promise: tokens that are not those of the same request with speculation off."""
    return [
        f"{row['name']}: {row[num_all] - row[num_same]} of {row[num_all]} outputs differ"
        for row in rows
        if row[num_all] != row[num_same]
    ]


def machine_remarks(machine: Mapping[str, Any]) -> list[str]:
    """A warning where the machine was busy."""
    load, cores = machine["load_average_1m"], machine["usable_cores"] or 1
    if load < BUSY_LOAD_PER_CORE * cores:
        return []
    return [
        f"The machine was busy when the benchmark began (load average {load:.2f} on {cores} cores): these figures "
        "measure the neighbours too."
    ]


def write_report(report: Report, shown: Shown, out: Path, name: str = "") -> str:
    """Write `NAME.json`, `.png` and `.html` as far as the suite has them, print its tables, and say what was written.

    `name` is the suite's unless it is given.
    """
    path = out / (name or report["suite"])
    written = [path.with_suffix(".json")]
    write_json(report, written[0])
    if shown.panels:
        written.append(path.with_suffix(".png"))
        draw(report, shown.panels, written[-1], shown.panels_per_row)
    if shown.has_page:
        written.append(path.with_suffix(".html"))
        write_html(report, written[1], written[-1])
    print_tables(report, shown.tables, shown.line, shown.ratio_title)
    return "wrote " + " and ".join(map(str, written))


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """Write the document, for people to diff."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_html(report: Mapping[str, Any], picture: Path, path: Path) -> None:
    """Write the report and its PNG as one page that needs no other file."""
    spread = report["ratio_spread"]
    ratios = [
        {"figure": name, "value": value, "least": spread[name][0], "most": spread[name][1]}
        for name, value in report["ratios"].items()
        if name in spread
    ]
    origin = {name: report[name] for name in _ORIGIN}
    page = _PAGE.substitute(
        title=f"coppice bench {html.escape(report['suite'])}",
        remarks=_paragraphs(report["mismatches"], "problem") + _paragraphs(report["notes"], "note"),
        ratios=_html_table(ratios),
        ratio_note=html.escape(report["ratio_note"]),
        picture=base64.b64encode(picture.read_bytes()).decode(),
        rows=_html_table(report["rows"]),
        origin=html.escape(json.dumps(origin, indent=1, ensure_ascii=False)),
    )
    path.write_text(page, encoding="utf-8")


def shown_path(path: Path) -> str:
    """A path as a report has it: relative to the repository or the current folder, so that it names no machine."""
    for base in (MODELS.parent, Path.cwd()):
        if path.resolve().is_relative_to(base.resolve()):
            return path.resolve().relative_to(base.resolve()).as_posix()
    return path.name


def _paragraphs(texts: Iterable[str], kind: str) -> str:
    return "\n".join(f'<p class="{kind}">{html.escape(text)}</p>' for text in texts)


def _html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A column for every field of any row."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    lines = ("".join(f"<td>{_html_cell(row.get(name))}</td>" for name in columns) for row in rows)
    return f"<table>\n<tr>{head}</tr>\n" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table>"


def _html_cell(value: Any) -> str:
    return "-" if value is None else html.escape(str(value))
