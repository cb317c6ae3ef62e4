"""Which drafters `coppice bench ablation` measures unless it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from coppice.cli.bench import ablation


def test_a_kind_joins_when_its_checkpoint_is_there_with_a_model_or_with_another_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablation, "MODELS", tmp_path)
    for name, file in (
        ("small-lm", "config.json"),
        ("eagle", "drafter.json"),
        ("diffusion", "README.md"),
        ("target", "config.json"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    found = ablation._drafters(None)
    assert [(spec.kind, spec.model) for spec in found] == [
        ("small-lm", str(tmp_path / "small-lm")),
        ("eagle", str(tmp_path / "eagle")),
    ]
