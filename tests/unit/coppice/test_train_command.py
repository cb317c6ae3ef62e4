"""`coppice train` says what the user can mend in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coppice.cli.__main__ import app


def test_the_state_of_another_recipe_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "module.py").write_text("".join(f"value_{n} = {n}\n" for n in range(200)))
    (tmp_path / "model.state").mkdir()
    (tmp_path / "model.state" / "recipe.json").write_text("{}")
    (tmp_path / "model.state" / "state.pt").touch()
    arguments = ["target", "--corpus", str(tmp_path / "corpus"), "--out", str(tmp_path / "model"), "--steps", "1"]
    result = CliRunner().invoke(app, ["train", *arguments])
    assert result.exit_code == 2
    assert "model.state" in result.output
    assert "other settings" in result.output


@pytest.mark.parametrize("kind", ["semi-ar", "diffusion"])
def test_recipes_of_block_drafters_get_the_options(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    block_run = pytest.importorskip("drafter_svc.training.block_run")
    monkeypatch.setattr(block_run, "train_block_drafter", lambda *arguments: calls.append(arguments))
    sizes = ["--steps", "7", "--samples", "64", "--corpus-rows", "5", "--seed", "3", "--threads", "1"]
    directories = ["--corpus", str(tmp_path), "--target", "t", "--start", "s", "--out", "o"]
    result = CliRunner().invoke(app, ["train", kind, *sizes, *directories])
    assert result.exit_code == 0, result.output
    [(roots, target, start, out, objective)] = calls
    recipe = objective.recipe
    assert (roots, target, start, out) == ([tmp_path], Path("t"), Path("s"), Path("o"))
    assert recipe.transition_rank == (64 if kind == "semi-ar" else 0)
    assert (recipe.kind, recipe.steps, recipe.sample_rows, recipe.corpus_rows, recipe.seed) == (kind, 7, 64, 5, 3)


def test_the_recipe_of_boosted_small_lms_gets_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    recipes = pytest.importorskip("drafter_svc.training.boost")
    monkeypatch.setattr(recipes, "train_boost", lambda *arguments: calls.append(arguments))
    sizes = ["--num", "3", "--steps", "7", "--samples", "64", "--corpus-rows", "5", "--seed", "3", "--threads", "1"]
    directories = ["--corpus", str(tmp_path), "--target", "t", "--start", "s", "--out", "o"]
    result = CliRunner().invoke(app, ["train", "boost", *sizes, *directories])
    assert result.exit_code == 0, result.output
    [(roots, target, start, out, num_models, recipe)] = calls
    assert (roots, target, start, out, num_models) == ([tmp_path], Path("t"), Path("s"), Path("o"), 3)
    assert (recipe.steps, recipe.sample_rows, recipe.corpus_rows, recipe.seed) == (7, 64, 5, 3)
    assert CliRunner().invoke(app, ["train", "boost", "--num", "5"]).exit_code == 2


def one_line(arguments: list[str]) -> str:
    """What the command says of a mistake."""
    result = CliRunner().invoke(app, ["train", *arguments])
    assert result.exit_code in (1, 2), result.output
    [line] = result.stderr.splitlines()[-1:]
    assert line.startswith("coppice: ")
    return line


def test_a_corpus_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    assert "absent does not exist" in one_line(["tokenizer", "--corpus", absent, "--out", str(tmp_path / "out")])


@pytest.mark.parametrize("kind", ["small-lm", "semi-ar", "boost"])
@pytest.mark.parametrize("is_there", [False, True], ids=["no directory", "no model in it"])
def test_a_target_that_is_not_there_is_told_in_one_line(kind: str, is_there: bool, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    directory = tmp_path / "of_models"
    if is_there:
        directory.mkdir()
    said = one_line([kind, "--target", str(directory), "--corpus", str(tmp_path), "--out", str(tmp_path / "out")])
    assert f"no model can be read from {directory}" in said


def test_files_that_are_not_there_are_told_in_one_line_whatever_is_trained(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    arguments = ["--tokenizer", str(tmp_path / "absent"), "--corpus", str(tmp_path), "--out", str(tmp_path / "out")]
    one_line(["target", *arguments])


@pytest.mark.parametrize(
    "options",
    [
        ["target", "--steps", "0"],
        ["small-lm", "--steps", "0"],
        ["small-lm", "--fresh-steps", "0"],
        ["small-lm", "--fresh-cycles", "-1"],
        ["semi-ar", "--steps", "0"],
        ["boost", "--steps", "-3"],
        ["space", "--steps", "0"],
        ["early-exit", "--layer", "0"],
    ],
    ids=" ".join,
)
def test_numbers_that_mean_nothing_are_usage_errors(options: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", *options, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert options[1] in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["small-lm", "semi-ar", "diffusion", "boost", "space"])
def test_fewer_samples_than_a_batch_are_a_bad_option(kind: str, tmp_path: Path) -> None:
    directories = ["--corpus", str(tmp_path / "absent"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["train", kind, "--samples", "63", *directories])
    assert result.exit_code == 2
    assert "--samples" in result.output
