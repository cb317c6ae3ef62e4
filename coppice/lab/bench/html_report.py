"""A report as one HTML file that needs nothing else: figures, picture, and what they were measured with."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

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
# Of the report, what says where it comes from.
_ORIGIN = ("command", "commit", "settings", "machine", "versions")


def write_html(report: Mapping[str, Any], picture: Path, path: Path) -> None:
    """Write a suite's report, with the PNG that was drawn of it, beside its JSON."""
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
        ratios=_table(ratios),
        ratio_note=html.escape(report["ratio_note"]),
        picture=base64.b64encode(picture.read_bytes()).decode(),
        rows=_table(report["rows"]),
        origin=html.escape(json.dumps(origin, indent=1, ensure_ascii=False)),
    )
    path.write_text(page, encoding="utf-8")


def _paragraphs(texts: Iterable[str], kind: str) -> str:
    return "\n".join(f'<p class="{kind}">{html.escape(text)}</p>' for text in texts)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A column for everything that any row has."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    lines = ("".join(f"<td>{_cell(row.get(name))}</td>" for name in columns) for row in rows)
    return f"<table>\n<tr>{head}</tr>\n" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table>"


def _cell(value: Any) -> str:
    return "-" if value is None else html.escape(str(value))
