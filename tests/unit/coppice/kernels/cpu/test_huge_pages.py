"""The command line starts anew with an allocator that asks for huge pages: once, and only where that helps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coppice.kernels.cpu.huge_pages import SETTING, VARIABLE, start_with_huge_pages

SCRIPT = """
import os, sys
from pathlib import Path
from coppice.kernels.cpu.huge_pages import start_with_huge_pages
print("begins", os.getpid(), flush=True)
start_with_huge_pages(mode_file=Path(sys.argv[1]))
print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), sys.argv[2:])
"""


def run(mode_file: Path, **env: str) -> list[str]:
    arguments = [sys.executable, "-c", SCRIPT, str(mode_file), "with space", "--option"]
    clean = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.run(
        arguments, env={**clean, **env}, capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()


@pytest.fixture
def asking(tmp_path: Path) -> Path:
    path = tmp_path / "enabled"
    path.write_text("always [madvise] never\n")
    return path


def test_the_process_starts_anew_once_as_itself(asking: Path) -> None:
    first, second, last = run(asking)
    pid = first.split()[1]
    assert second == first
    assert last == f"{pid} {SETTING} ['with space', '--option']"


def test_whoever_has_a_setting_keeps_it(asking: Path) -> None:
    [_, last] = run(asking, GLIBC_TUNABLES="glibc.malloc.hugetlb=0")
    assert "glibc.malloc.hugetlb=0" in last


@pytest.mark.parametrize("mode", ["[always] madvise never", "always madvise [never]", None])
def test_nothing_happens_where_asking_changes_nothing(tmp_path: Path, mode: str | None) -> None:
    path = tmp_path / "enabled"
    if mode is not None:
        path.write_text(mode)

    def start(*arguments: object) -> None:
        raise AssertionError(arguments)

    start_with_huge_pages({}, path, start)
