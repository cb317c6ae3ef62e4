"""Attacks and faults that the pages name are those that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.attacks.kinds import ATTACKS, DRAFTER, MAX_VALID_RATIO, VERIFIER
from tests.faults.kinds import KINDS

DOCS = Path("docs")
_NAME = re.compile(r"`([a-z:-]+)`")


def section(page: str, begin: str, end: str) -> str:
    """The part of a page from one text to another."""
    text = (DOCS / page).read_text()
    return text[text.index(begin) : text.index(end)]


def first_cells(text: str) -> list[str]:
    """First cells of the rows of all tables, their heads left out."""
    cells = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    return [cell for cell, below in zip(cells, [*cells[1:], ""], strict=True) if "---" not in cell + below]


def test_the_page_has_every_attack_once() -> None:
    tried = section("attacks.md", "## What is tried", "Not tried:")
    named = [name for cell in first_cells(tried) for name in _NAME.findall(cell)]
    both, _, alone = section("attacks.md", "On the ports of verifier", "In the\nchart").partition(", and ")
    inside = _NAME.findall(both.partition(":\n")[2])
    named += [f"{service}:{name}" for service in (VERIFIER, DRAFTER) for name in inside] + _NAME.findall(alone)
    assert sorted(named) == sorted(ATTACKS)


def test_the_page_has_every_attack_of_valid_requests() -> None:
    limits = section("attacks.md", "the same for valid requests in large numbers", "| 10:")
    assert set(_NAME.findall(limits)) == {
        name for name, attack in ATTACKS.items() if attack.max_ratio == MAX_VALID_RATIO
    }


def test_the_page_has_every_kind_of_fault_once() -> None:
    cells = first_cells(section("faults.md", "| fault | where", "The orchestrator is never killed"))
    assert sorted(name for cell in cells for name in cell.split(", ")) == sorted(KINDS)


def test_the_committed_runs_have_every_attack_and_every_kind_of_fault() -> None:
    results = Path("results")
    attacks = json.loads((results / "attacks.json").read_text())["rows"]
    assert sorted(row["name"] for row in attacks) == sorted(ATTACKS)
    assert json.loads((results / "faults.json").read_text())["faults"].keys() == KINDS.keys()
