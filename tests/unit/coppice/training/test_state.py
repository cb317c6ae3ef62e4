"""A run goes on from its own state only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from coppice.training.state import ForeignStateError, open_state, weights_digest


@dataclass(frozen=True)
class Recipe:
    """A run's settings."""

    steps: int = 3
    share: float = 0.1


def test_the_state_lies_beside_the_checkpoint_and_is_found_again(tmp_path: Path) -> None:
    directory = open_state(tmp_path / "model", Recipe(), {})
    assert directory == tmp_path / "model.state"
    (directory / "state.pt").touch()
    assert open_state(tmp_path / "model", Recipe(), {}) == directory


def test_other_settings_do_not_go_on_from_it(tmp_path: Path) -> None:
    (open_state(tmp_path / "model", Recipe(), {}) / "state.pt").touch()
    with pytest.raises(ForeignStateError, match="delete it"):
        open_state(tmp_path / "model", Recipe(steps=4), {})


def test_a_state_in_which_nothing_is_kept_yet_is_anybodys(tmp_path: Path) -> None:
    open_state(tmp_path / "model", Recipe(), {"corpus": "too small"})
    directory = open_state(tmp_path / "model", Recipe(steps=4), {"corpus": "large enough"})
    (directory / "tokens.npz").touch()
    with pytest.raises(ForeignStateError, match="other settings"):
        open_state(tmp_path / "model", Recipe(), {"corpus": "too small"})


def test_a_state_that_names_no_recipe_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "model.state").mkdir()
    open_state(tmp_path / "model", Recipe(), {})
    (tmp_path / "other.state").mkdir()
    (tmp_path / "other.state" / "state.pt").touch()
    with pytest.raises(ForeignStateError, match="which recipe"):
        open_state(tmp_path / "other", Recipe(), {})


def test_a_state_is_that_of_the_same_models_and_corpus(tmp_path: Path) -> None:
    made_from = {"target": "a", "start": "b", "corpus": "c"}
    for _ in range(2):
        (open_state(tmp_path / "model", Recipe(), made_from) / "state.pt").touch()
    with pytest.raises(ForeignStateError, match="from another start "):
        open_state(tmp_path / "model", Recipe(), {**made_from, "start": "x"})
    with pytest.raises(ForeignStateError, match="from another corpus and target "):
        open_state(tmp_path / "model", Recipe(), {"target": "x", "start": "b", "corpus": "x"})
    with pytest.raises(ForeignStateError, match="other settings"):
        open_state(tmp_path / "model", Recipe(steps=4), made_from)
    open_state(tmp_path / "model", Recipe(), made_from)


def test_a_state_that_does_not_say_what_it_was_made_from_is_not_used(tmp_path: Path) -> None:
    directory = open_state(tmp_path / "model", Recipe(), {})
    (directory / "state.pt").touch()
    path = directory / "recipe.json"
    # As it was before digests were kept.
    path.write_text(
        json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "made_from"})
    )
    with pytest.raises(ForeignStateError, match="does not say which models and corpus"):
        open_state(tmp_path / "model", Recipe(), {"target": "a"})
    (tmp_path / "model.state" / "recipe.json").write_text("{")
    with pytest.raises(ForeignStateError, match="damaged"):
        open_state(tmp_path / "model", Recipe(), {"target": "a"})


def test_weights_have_the_same_digest_in_every_precision_that_holds_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4)).to(torch.bfloat16)
    digest = weights_digest(model)
    assert weights_digest(model.to(torch.float32)) == digest
    with torch.no_grad():
        model[1].bias[0] += 1
    assert weights_digest(model) != digest
