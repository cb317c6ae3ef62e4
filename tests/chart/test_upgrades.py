"""An upgrade from the chart that installations have: refused nowhere, and as the table of docs/upgrades.md says."""

from __future__ import annotations

import copy
import re
import subprocess
from typing import Any

import pytest

from tests.chart.rendering import CHART, ROOT
from tests.chart.upgrades import BASE, PROFILES, Differences, changed, differences, installed, upgrade


@pytest.fixture(scope="module")
def from_base() -> dict[str, Differences]:
    try:
        return upgrade()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"commit {BASE} cannot be had: no git, or a shallow clone")


every_profile = pytest.mark.parametrize("profile", [*PROFILES, "eagle"])


@every_profile
def test_kubernetes_refuses_no_change_and_nothing_goes_away(from_base: dict[str, Differences], profile: str) -> None:
    assert not from_base[profile].refused
    assert not from_base[profile].gone


def table() -> dict[str, str]:
    """What docs/upgrades.md says of an upgrade from BASE, by the first column."""
    _, _, text = (ROOT / "docs" / "upgrades.md").read_text().partition(f"From commit `{BASE[:7]}`")
    return dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", text.partition("\n## ")[0], re.MULTILINE))


def restarted(found: Differences) -> dict[str, set[str]]:
    """Variables that change in pods that are started again, by the table's rows; what else changes by its path."""
    rows: dict[str, set[str]] = {}
    for line in found.restarted:
        name, _, paths = line.partition(": ")
        [row] = re.findall("orchestrator|verifier|drafter", name)
        for path in paths.split(", "):
            variable = re.search(r"/env/(\w+)(/value| \(new\)| \(gone\))$", path)
            rows.setdefault(f"{row}s", set()).add(variable[1] if variable else path)
    return rows


def test_the_table_tells_who_is_started_again_for_which_variables(from_base: dict[str, Differences]) -> None:
    found: dict[str, set[str]] = {}
    for profile, one in from_base.items():
        for row, variables in restarted(one).items():
            found.setdefault(row, set()).update(variables)
            # Drafters are, of one kind alone.
            assert row != "drafters" or profile == "eagle"
    told = {row: set(re.findall(r"`([A-Z]+_[A-Z_]+)`", text)) - {"GRACE_S"} for row, text in table().items()}
    assert found.keys() == {row for row, text in table().items() if "started again" in text}
    assert found == {row: told[row] for row in found}


@every_profile
def test_no_object_comes_as_the_table_says(from_base: dict[str, Differences], profile: str) -> None:
    assert table()["objects"] == "the same: none goes away, and none comes"
    assert not from_base[profile].new


def without(manifests: Any, kind: str, *path: str) -> Any:
    found = copy.deepcopy(manifests)
    place = next(one for (one_kind, _), one in found.items() if one_kind == kind)
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = {"another": "value"}
    return found


@pytest.mark.parametrize("path", [("spec", "selector"), ("spec", "serviceName")])
def test_a_change_that_kubernetes_refuses_is_found(path: tuple[str, ...]) -> None:
    now = installed(CHART, {})
    [refused] = differences(now, without(now, "StatefulSet", *path)).refused
    assert refused.endswith(path[-1])


def test_what_goes_away_and_who_is_started_again_is_found() -> None:
    now = installed(CHART, {})
    assert vars(differences(now, now)) == vars(Differences())
    other = without(now, "Deployment", "spec", "template", "metadata")
    [restarted] = differences(now, other).restarted
    assert "/metadata" in restarted
    one = next(iter(now))
    assert differences(now, {key: value for key, value in now.items() if key != one}).gone == [" ".join(one)]
    assert differences({}, {one: now[one]}).new == [" ".join(one)]


def test_changes_are_told_by_their_path() -> None:
    old = {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}], "args": [1]}
    new = {"env": [{"name": "B", "value": "3"}, {"name": "C", "value": "2"}], "args": [2]}
    assert list(changed(old, new)) == ["/env/A (gone)", "/env/B/value", "/env/C (new)", "/args"]
