"""A run goes on from its own state only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from training.state import ForeignStateError, open_state


@dataclass(frozen=True)
class Recipe:
    """A run's settings."""

    steps: int = 3
    share: float = 0.1


def test_the_state_lies_beside_the_checkpoint_and_is_found_again(tmp_path: Path) -> None:
    directory = open_state(tmp_path / "model", Recipe())
    assert directory == tmp_path / "model.state"
    (directory / "state.pt").touch()
    assert open_state(tmp_path / "model", Recipe()) == directory


def test_other_settings_do_not_go_on_from_it(tmp_path: Path) -> None:
    open_state(tmp_path / "model", Recipe())
    with pytest.raises(ForeignStateError, match="delete it"):
        open_state(tmp_path / "model", Recipe(steps=4))


def test_a_state_that_names_no_recipe_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "model.state").mkdir()
    open_state(tmp_path / "model", Recipe())
    (tmp_path / "other.state").mkdir()
    (tmp_path / "other.state" / "state.pt").touch()
    with pytest.raises(ForeignStateError, match="which recipe"):
        open_state(tmp_path / "other", Recipe())
