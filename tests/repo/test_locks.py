"""The locks of the images are written together, by the tool that they name, and not long before a release."""

from __future__ import annotations

import re
from datetime import date, timedelta
from pathlib import Path

import pytest

from scripts.lock import UV

ROOT = Path(__file__).resolve().parents[2]
LOCKS = {path.stem: path.read_text() for path in (ROOT / "docker" / "locks").glob("*.txt")}
# CONTRIBUTING.md: `make lock` is the first step of a release.
MAX_AGE = timedelta(days=14)


def written(lock: str) -> date:
    """The day on which a lock was written."""
    [day] = re.findall(r"^# Written by scripts/lock\.py \(`make lock`\) on (\S+)\. ", lock)
    return date.fromisoformat(day)


def released(changelog: str) -> list[date]:
    """The days of all releases."""
    return [date.fromisoformat(day) for day in re.findall(r"^## \[\S+\] - (\d\S+)$", changelog, re.MULTILINE)]


def is_too_old(lock: date, releases: list[date]) -> bool:
    """Whether a lock was written long before the newest release."""
    return bool(releases) and lock < max(releases) - MAX_AGE


def test_all_are_written_on_one_day() -> None:
    assert len({written(lock) for lock in LOCKS.values()}) == 1


def test_they_are_renewed_before_a_release() -> None:
    releases = released((ROOT / "CHANGELOG.md").read_text())
    assert not is_too_old(written(LOCKS["build"]), releases), "make lock"


@pytest.mark.parametrize(("day", "is_old"), [("2026-05-14", False), ("2026-05-15", True), ("Unreleased", False)])
def test_a_release_with_an_old_lock_is_found(day: str, is_old: bool) -> None:
    changelog = f"# Changelog\n\n## [0.2.0] - {day}\n\n### Added\n\n## [0.1.0] - 2026-01-02\n"
    assert is_too_old(date(2026, 4, 30), released(changelog)) == is_old


def test_the_lock_of_tools_has_the_uv_that_writes_locks() -> None:
    assert f"\n{UV} \\\n" in LOCKS["build"]
