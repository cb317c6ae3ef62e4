"""An upgrade from the chart that installations have: refused nowhere, and nothing goes away."""

from __future__ import annotations

import copy
import subprocess
from typing import Any

import pytest

from tests.chart.rendering import CHART
from tests.chart.upgrades import BASE, PROFILES, Differences, changed, differences, installed, upgrade


@pytest.fixture(scope="module")
def from_base() -> dict[str, Differences]:
    try:
        return upgrade()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"commit {BASE} cannot be had: no git, or a shallow clone")


@pytest.mark.parametrize("profile", PROFILES)
def test_kubernetes_refuses_no_change_and_nothing_goes_away(from_base: dict[str, Differences], profile: str) -> None:
    assert not from_base[profile].refused
    assert not from_base[profile].gone


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
