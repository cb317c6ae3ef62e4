"""`coppice train` says what the user can mend in one line."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from coppice.cli.train import app


def test_the_state_of_another_recipe_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "model.state").mkdir()
    (tmp_path / "model.state" / "recipe.json").write_text("{}")
    arguments = ["target", "--corpus", str(tmp_path / "corpus"), "--out", str(tmp_path / "model"), "--steps", "1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "model.state" in result.output
    assert "other settings" in result.output
