"""The result of a suite: a JSON document, a picture, and tables on the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
_NO_RATIOS = Ratios({}, {})
RATIO_NOTE = "docs/benchmarks.md says what each ratio is; medians over runs of the ratio within a run"


@dataclass(frozen=True, slots=True)
class Shown:
    """How a suite's report is shown: tables, a line that says how much was measured, panels of the picture.

    `page` makes an HTML file of the report and the path of its picture, which there has to be. `line` is a template
    over the report's `settings`, as are the titles of tables.
    """

    tables: Sequence[Table]
    panels: Sequence[Panel] = ()
    line: str = ""
    panels_per_row: int = 3
    # Of the table of ratios; empty: ratios are not shown.
    ratio_title: str = field(default="Ratios within a run, over runs")
    page: Callable[[Report, Path], str] | None = None


def document(
    suite: str,
    machine: Mapping[str, Any],
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    ratios: Ratios = _NO_RATIOS,
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
        "ratio_note": RATIO_NOTE if ratios.values else "",
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


def write_report(report: Report, shown: Shown, out: Path) -> str:
    """Write `SUITE.json`, and `.png` and `.html` where the suite has them, print its tables, say what was written."""
    path = out / report["suite"]
    written = [path.with_suffix(".json")]
    write_json(report, written[0])
    if shown.panels:
        written.append(path.with_suffix(".png"))
        draw(report, shown.panels, written[-1], shown.panels_per_row)
    if shown.page is not None:
        written.append(path.with_suffix(".html"))
        written[-1].write_text(shown.page(report, written[-2]), encoding="utf-8")
    print_tables(report, shown.tables, shown.line, shown.ratio_title)
    return "wrote " + " and ".join(map(str, written))


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """Write the document, for people to diff."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


def shown_path(path: Path) -> str:
    """A path as a report has it: relative to the repository or the current folder, so that it names no machine."""
    for base in (MODELS.parent, Path.cwd()):
        if path.resolve().is_relative_to(base.resolve()):
            return path.resolve().relative_to(base.resolve()).as_posix()
    return path.name
