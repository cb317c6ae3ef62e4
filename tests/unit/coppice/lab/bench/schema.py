"""Whether a report has what the committed result of its suite has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[5] / "results"
# What tells kinds of rows of one suite apart.
KINDS = ("part", "kind")


def lost_fields(report: dict[str, Any], result: str) -> set[str]:
    """Fields of `results/RESULT` that a report lacks: its own, those of settings, and those of rows of a kind."""
    committed = json.loads((RESULTS / result).read_text())
    lost = {name for name in committed if name not in report}
    lost |= {f"settings.{name}" for name in committed["settings"] if name not in report["settings"]}
    fields = _row_fields(report)
    for kind, names in _row_fields(committed).items():
        if kind in fields:
            lost |= {f"{kind}.{name}" for name in names - fields[kind]}
    return lost


def _row_fields(report: dict[str, Any]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in report["rows"]:
        kind = next((str(row[name]) for name in KINDS if name in row), "rows")
        found.setdefault(kind, set()).update(row)
    return found
