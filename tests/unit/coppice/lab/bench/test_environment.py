"""What a report says about machine and commit."""

from __future__ import annotations

import subprocess
from datetime import UTC, date, datetime
from pathlib import Path

from coppice.lab.bench.environment import describe_commit, describe_run


def test_a_report_says_on_which_day_it_was_made() -> None:
    before = datetime.now(UTC).date()
    report = describe_run({"cpu": "some"})
    assert before <= date.fromisoformat(report["date"]) <= datetime.now(UTC).date()
    assert report["machine"] == {"cpu": "some"}


def test_outside_of_a_repository_the_commit_is_unknown(tmp_path: Path) -> None:
    assert describe_commit(tmp_path) == {"revision": "unknown", "dirty": None}


def test_a_changed_working_tree_is_dirty(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "--message", "first")
    clean = describe_commit(tmp_path)
    (tmp_path / "file").write_text("two")
    changed = describe_commit(tmp_path)
    assert len(clean["revision"]) == 40
    assert (clean["dirty"], changed["dirty"]) == (False, True)
    assert changed["revision"] == clean["revision"]
