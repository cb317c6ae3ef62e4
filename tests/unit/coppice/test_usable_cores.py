"""Cores as affinity and the quota of a container allow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coppice import usable_cores as module
from coppice.usable_cores import usable_cores


@pytest.fixture(autouse=True)
def container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Four cores, and no quota."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.setattr(module, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(module, "_QUOTA_V1", (tmp_path / "quota", tmp_path / "period"))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("9000000 100000", 4), ("", 4), ("1 0", 4)],
)
def test_the_quota_bounds_cores(text: str, cores: int, container: Path) -> None:
    assert usable_cores() == 4
    (container / "cpu.max").write_text(f"{text}\n")
    assert usable_cores() == cores


@pytest.mark.parametrize(("quota", "cores"), [(-1, 4), (200000, 2)])
def test_the_quota_of_the_first_version_bounds_them_too(quota: int, cores: int, container: Path) -> None:
    (container / "quota").write_text(f"{quota}\n")
    assert usable_cores() == 4
    (container / "period").write_text("100000\n")
    assert usable_cores() == cores


def test_without_affinity_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert usable_cores() == 3
