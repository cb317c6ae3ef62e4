"""Drafters are told the target's checkpoint, which eagle drafters read tables of."""

from __future__ import annotations

from pathlib import Path

from coppice.cli.options import topology_spec
from coppice.cli.topology import Topology
from drafter_svc.config import DrafterConfig
from tests.tiny_checkpoint import write_names_of_a_checkpoint


def test_a_drafter_is_told_the_target(tmp_path: Path) -> None:
    target, drafter = tmp_path / "target", tmp_path / "eagle"
    write_names_of_a_checkpoint(target)
    drafter.mkdir()
    spec = topology_spec(str(target), [f"eagle={drafter}"])
    [eagle] = spec.drafters
    topology = Topology(spec)
    config = DrafterConfig.from_env(topology._drafter_env(eagle))
    assert (config.drafter_kind, config.model, config.target_model) == ("eagle", str(drafter), str(target))
    assert topology._colocated_env()["DRAFTER_TARGET_MODEL"] == str(target)
