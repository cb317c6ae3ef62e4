"""Which adapter verifiers get: the bundled one where the bundled target has no drafter, and what is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from coppice.cli import options
from coppice.cli.options import AUTO, DEFAULT_TARGET, OFF, topology_spec
from coppice.cli.topology import NO_DRAFTER, Topology
from tests.tiny_checkpoint import write_names_of_a_checkpoint


@pytest.fixture(autouse=True)
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SPACE_ADAPTER", raising=False)
    directory = tmp_path / "space"
    write_names_of_a_checkpoint(directory)
    (directory / "space.json").write_text("{}")
    monkeypatch.setattr(options, "DEFAULT_SPACE", directory)
    return directory


def test_the_bundled_target_drafts_for_itself_where_nobody_else_does(bundled: Path) -> None:
    assert topology_spec(DEFAULT_TARGET, [NO_DRAFTER]).space == str(bundled)
    assert topology_spec(DEFAULT_TARGET, None).space is None
    assert topology_spec(str(bundled), [NO_DRAFTER]).space is None
    assert topology_spec(DEFAULT_TARGET, [NO_DRAFTER], space=OFF).space == ""


def test_the_environment_has_its_say_unless_an_option_does(bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPACE_ADAPTER", "mine")
    assert topology_spec(DEFAULT_TARGET, [NO_DRAFTER]).space is None
    assert topology_spec(DEFAULT_TARGET, [NO_DRAFTER], space=str(bundled)).space == str(bundled)


def test_without_a_bundled_adapter_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(options, "DEFAULT_SPACE", tmp_path / "none")
    assert topology_spec(DEFAULT_TARGET, [NO_DRAFTER], space=AUTO).space is None


def test_a_directory_without_an_adapter_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match=r"no space\.json"):
        topology_spec(DEFAULT_TARGET, None, space=str(tmp_path))


def test_verifiers_are_told_in_processes_of_their_own_and_in_one(bundled: Path) -> None:
    spec = topology_spec(DEFAULT_TARGET, None, space=str(bundled))
    assert Topology(spec)._verifier_env()["SPACE_ADAPTER"] == str(bundled)
    assert Topology(spec)._colocated_env()["VERIFIER_SPACE_ADAPTER"] == str(bundled)
    assert "SPACE_ADAPTER" not in Topology(topology_spec(DEFAULT_TARGET, None))._verifier_env()
