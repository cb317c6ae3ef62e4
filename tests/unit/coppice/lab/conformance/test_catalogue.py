"""The cases as a whole: names, choosing among them, and what their groups promise."""

from __future__ import annotations

import re
from pathlib import Path

from coppice.lab.conformance.catalogue import all_groups, cases_like

NAME = re.compile(r"[a-z-]+/[a-z0-9.-]+")


def test_every_case_has_a_name_of_its_own_that_begins_with_its_group() -> None:
    names = [case.name for case in cases_like(())]
    assert len(names) == len(set(names)) >= 60
    assert all(NAME.fullmatch(name) for name in names)
    for group in all_groups():
        assert group.cases
        assert all(case.name.startswith(f"{group.name}/") for case in group.cases)


def test_patterns_choose_cases_by_name() -> None:
    assert [case.name for case in cases_like(["seeds/same-*", "greedy/is-the-default"])] == [
        "greedy/is-the-default",
        "seeds/same-seed-same-answer",
    ]
    assert not cases_like(["no-such-case"])


def test_the_documentation_counts_them() -> None:
    page = (Path(__file__).resolve().parents[5] / "docs" / "conformance.md").read_text()
    assert re.findall(r"\((\d+)\s+in (\d+) groups\)", page) == [(str(len(cases_like(()))), str(len(all_groups())))]
