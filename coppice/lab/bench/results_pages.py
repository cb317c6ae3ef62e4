"""`docs/results/`: one Markdown page for each committed JSON file of results, and the pictures that belong to them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coppice.lab.bench.harness.tables import cell

GENERATED = "<!-- Written by `coppice bench report`. Do not edit. -->"
# Shown in the head of a page, or too long to show.
HEAD = {
    "suite", "rows", "ratios", "ratio_spread", "ratio_note", "notes", "settings", "machine", "versions", "command",
    "commit", "dirty", "date", "mismatches", "violations",
}  # fmt: skip


def write_pages(results: Path, out: Path) -> list[Path]:
    """Write a page for each `*.json` below `results`, and an index, to `out`.

    A picture next to a file, which its suite has drawn, is copied; without one, the page keeps the picture that it has.
    Pages that an earlier call wrote and that have no file any more are deleted. Returns what was written.
    Raises ValueError for a file that holds no JSON object.
    """
    written: list[Path] = []
    entries = []
    out.mkdir(parents=True, exist_ok=True)
    for source in sorted(results.rglob("*.json")):
        report = json.loads(source.read_text(encoding="utf-8"))
        if not isinstance(report, dict):
            raise ValueError(f"{source} holds no JSON object")
        name = "-".join(source.relative_to(results).with_suffix("").parts)
        drawn, picture = source.with_suffix(".png"), out / f"{name}.png"
        if drawn.is_file():
            shutil.copyfile(drawn, picture)
        if picture.is_file():
            written.append(picture)
        page = out / f"{name}.md"
        title = source.relative_to(results).as_posix()
        page.write_text(_page(title, name, report, picture.is_file()), encoding="utf-8")
        written.append(page)
        entries.append((name, title, report))
    index = out / "index.md"
    index.write_text(_index(entries), encoding="utf-8")
    written.append(index)
    for stale in {*out.glob("*.md"), *out.glob("*.png")} - set(written):
        stale.unlink()
    return written


def _index(entries: Sequence[tuple[str, str, Mapping[str, Any]]]) -> str:
    rows = [
        (f"[{title}]({name}.md)", report.get("machine", {}).get("cpu", ""), _code(report.get("command", "")))
        for name, title, report in entries
    ]
    text = [
        "Each page is made of one file in `results/`. [Benchmarks](../benchmarks.md) defines the figures.",
        "",
        "Commands are those of the run. `--out` is where it wrote, `benchmarks/results` before files were moved",
        "to `results/`; to write over a committed file, name its directory in `results/`, as `file` has it.",
    ]
    return "\n".join([GENERATED, "", "# Results", "", *text, "", *_table(("file", "processor", "command"), rows), ""])


def _page(title: str, name: str, report: Mapping[str, Any], has_picture: bool) -> str:
    lines = [GENERATED, "", f"# {title}", "", *_table(("", ""), list(_facts(report))), ""]
    if has_picture:
        lines += [f"![{title}]({name}.png)", ""]
    lines += [f"- {_plain(note)}" for note in report.get("notes", [])]
    lines += [f"- **Mismatch:** {_plain(text)}" for text in report.get("mismatches", [])]
    if lines[-1]:
        lines.append("")
    if report.get("ratios"):
        lines += ["## Ratios", ""]
        if report.get("ratio_note"):
            lines += [_plain(report["ratio_note"]), ""]
        spread = report.get("ratio_spread", {})
        ratios = [
            (_code(key), _cell(value), " to ".join(_cell(end) for end in spread.get(key, ())))
            for key, value in report["ratios"].items()
        ]
        lines += [*_table(("ratio", "median", "range over runs"), ratios), ""]
    if report.get("rows"):
        lines += ["## Rows", "", *_rows(report["rows"]), ""]
    for key, value in report.items():
        if key not in HEAD and isinstance(value, Mapping) and (table := _mapping(value)):
            lines += [f"## {key}", "", *table, ""]
    return "\n".join(lines)


def _facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    machine = report.get("machine", {})
    yield "machine", f"{machine.get('cpu')}, {machine.get('usable_cores')} cores, {machine.get('memory_gib')} GiB"
    yield "system", str(machine.get("os"))
    yield "load at the start", _cell(machine.get("load_average_1m"))
    if "date" in report:
        yield "date", str(report["date"])
    yield "commit", _code(report.get("commit", "")) + (" with changes" if report.get("dirty") else "")
    yield "command", _code(report.get("command", ""))
    yield "versions", ", ".join(f"{key} {value}" for key, value in report.get("versions", {}).items())
    settings = {key: value for key, value in report.get("settings", {}).items() if _is_scalar(value)}
    if settings:
        yield "settings", ", ".join(f"{key} {_cell(value)}" for key, value in settings.items())
    for key, value in report.items():
        if key not in HEAD and _is_scalar(value):
            yield key, _cell(value)
    if "violations" in report:
        yield "violations", str(len(report["violations"]))


def _rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Numbers and texts of all rows; a column that says the same everywhere is a line of its own."""
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "note"]
    columns = [key for key in columns if all(_is_scalar(row.get(key)) for row in rows)]
    varying = [key for key in columns if len({_cell(row.get(key)) for row in rows}) > 1]
    same = [f"{key} {text}" for key in columns if key not in varying and (text := _cell(rows[0].get(key)))]
    head = [f"The same in every row: {', '.join(same)}.", ""] if same and len(rows) > 1 else []
    shown = varying if len(rows) > 1 else columns
    return [*head, *_table(shown, [[_cell(row.get(key)) for key in shown] for row in rows])]


def _mapping(value: Mapping[str, Any]) -> list[str]:
    """A table of numbers by name, or of such tables; nothing for what is neither."""
    if value and all(_is_scalar(item) for item in value.values()):
        return _table(("", ""), [(str(key), _cell(item)) for key, item in value.items()])
    if value and all(isinstance(item, Mapping) for item in value.values()):
        return _rows([{"name": key, **item} for key, item in value.items()])
    return []


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _cell(value: Any) -> str:
    return _plain(cell(value, missing=""))


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("\n", " ")


def _code(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""
