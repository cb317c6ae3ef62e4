"""The chart's README has every value of values.yaml, as it is there."""

from __future__ import annotations

from typing import Any

import yaml

from scripts.chart_readme import README, VALUES, page, rows


def test_the_readme_is_written_from_the_values() -> None:
    assert README.read_text() == page(VALUES.read_text()), "make configuration writes k8s/README.md"


def leaves(values: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Values by path; one-line objects are values."""
    found = {}
    for name, value in values.items():
        path = f"{above}{name}"
        found[path] = value
        if isinstance(value, dict):
            found |= leaves(value, f"{path}.")
    return found


def test_each_row_is_a_value_with_its_default() -> None:
    values = leaves(yaml.safe_load(VALUES.read_text()))
    shown = rows(VALUES.read_text())
    assert {name for name, _, _ in shown} <= values.keys()
    for name, default, _ in shown:
        if default.startswith("a list"):
            assert isinstance(values[name], list), name
        elif default:
            assert yaml.safe_load(default) == values[name], name
    # Every value is there, by itself or in an object of one line.
    names = [name for name, default, _ in shown if default]
    missing = [
        path
        for path in values
        if not any(path == n or path.startswith(f"{n}.") or n.startswith(f"{path}.") for n in names)
    ]
    assert not missing
