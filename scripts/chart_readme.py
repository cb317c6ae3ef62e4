"""Write k8s/README.md from k8s/values.yaml: each value with its default and the comment above it.

`make configuration` runs it; tests/chart/test_readme.py compares what is committed.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VALUES = ROOT / "k8s" / "values.yaml"
README = ROOT / "k8s" / "README.md"
INTRODUCTION = """# The chart's values

<!-- Written by scripts/chart_readme.py (`make configuration`) from values.yaml. -->

How to install and operate it: [Kubernetes](../docs/kubernetes.md). Settings under `config` are a service's own, by the
names of their environment variables: [configuration](../docs/configuration.md). A value without a description says what
its name says in Kubernetes.

| Value | Default | Meaning |
|---|---|---|
"""
_KEY = re.compile(r"( *)([\w.]+):(?: +(.*))?$")


def rows(text: str) -> list[tuple[str, str, str]]:
    """Path, default and description of every value, in the file's order; parts of a list belong to its key."""
    found: list[tuple[str, str, str]] = []
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    # Of the key whose list is read.
    list_of: int | None = None
    for line in text.splitlines():
        stripped, indent = line.strip(), len(line) - len(line.lstrip())
        if stripped.startswith("#"):
            comment.append(stripped.lstrip("# "))
        elif stripped.startswith("- ") and list_of is None:
            list_of = path[-1][0]
            name, _, description = found[-1]
            found[-1] = (name, "a list, see values.yaml", description)
        elif (match := _KEY.match(line)) and (list_of is None or indent <= list_of):
            list_of = None
            path = [(place, name) for place, name in path if place < indent]
            path.append((indent, match[2]))
            found.append((".".join(name for _, name in path), match[3] or "", " ".join(comment)))
            comment = []
        else:
            comment = []
    # Keys that only hold others, and say nothing themselves.
    return [row for row in found if row[1] or row[2]]


def page(text: str) -> str:
    """The text of k8s/README.md."""
    lines = [f"| `{name}` | {f'`{default}`' if default else ''} | {says} |" for name, default, says in rows(text)]
    return INTRODUCTION + "\n".join(lines) + "\n"


if __name__ == "__main__":
    README.write_text(page(VALUES.read_text()))
