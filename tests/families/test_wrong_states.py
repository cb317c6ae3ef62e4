"""Wrong states are found: by the probe while loading, and by the crowd where they come later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from coppice.core.errors import IncompatibleError
from tests.families.checkpoints import FAMILIES, plan_for
from tests.fuzz import exactness
from tests.fuzz.exactness import fuzz
from verifier_svc.config import VerifierConfig
from verifier_svc.engine.pass_plan import Segment
from verifier_svc.engine.state_slots import StateMoves
from verifier_svc.layers.linear_recurrence import LinearRecurrence
from verifier_svc.layers.recurrence import RowForest, StateCommit
from verifier_svc.model.loading import load_probed_target

# On a busy machine; a quiet one takes a tenth of it.
pytestmark = pytest.mark.timeout(600)

Inject = Callable[[pytest.MonkeyPatch], None]


def keep_rejected_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit every row of a segment, accepted or not."""
    commits_of = RowForest.commits_of

    def all_rows(forest: RowForest, moves: StateMoves) -> list[StateCommit]:
        commits = commits_of(forest, moves)
        ends = forest.starts[1:]
        return [
            replace(one, rows=tuple(range(int(forest.starts[one.segment]), int(ends[one.segment])))) for one in commits
        ]

    monkeypatch.setattr(RowForest, "commits_of", all_rows)


def take_trees_for_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a node follow the row before it in place of its parent."""
    original = RowForest.__init__

    def causal(forest: RowForest, segments: list[Segment]) -> None:
        original(forest, segments)
        forest.parents = np.where(forest.parents < 0, -1, np.arange(forest.num_rows) - 1)

    monkeypatch.setattr(RowForest, "__init__", causal)


def add_the_decay_of_a_sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decay a node's state by its sibling's step as well."""
    original = LinearRecurrence.__call__

    def decayed(layer: LinearRecurrence, *inputs: Tensor) -> Tensor:
        queries, keys, values, decays, steps = inputs
        parents = layer._forest.parents
        wrong = decays.clone()
        for row in range(1, len(parents)):
            if parents[row] >= 0 and parents[row] in parents[:row]:
                wrong[row] *= decays[int(np.flatnonzero(parents[:row] == parents[row])[0])]
        return original(layer, queries, keys, values, wrong, steps)

    monkeypatch.setattr(LinearRecurrence, "__call__", decayed)


def restore_another_border(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin at a shared prefix with an empty state."""
    copy = LinearRecurrence.copy

    def emptied(layer: LinearRecurrence, sources: Tensor, destinations: Tensor) -> None:
        copy(layer, sources, destinations)
        layer._states[destinations.numpy()] = 0

    monkeypatch.setattr(LinearRecurrence, "copy", emptied)


FAULTS = [
    ("lfm2", keep_rejected_nodes),
    ("lfm2", take_trees_for_chains),
    ("qwen3.5", keep_rejected_nodes),
    ("qwen3.5", take_trees_for_chains),
    ("qwen3.5", add_the_decay_of_a_sibling),
]


@pytest.mark.parametrize(("family", "inject"), FAULTS, ids=lambda one: getattr(one, "__name__", one))
def test_the_probe_refuses_the_model(
    family: str, inject: Inject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAMILIES[family].write(tmp_path)
    inject(monkeypatch)
    with pytest.raises(IncompatibleError, match="other logits over token trees"):
        load_probed_target(VerifierConfig(model=str(tmp_path), device="cpu"))


@pytest.mark.parametrize(
    ("family", "inject"), [*FAULTS, ("qwen3.5", restore_another_border)], ids=lambda one: getattr(one, "__name__", one)
)
def test_the_crowd_finds_it(family: str, inject: Inject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAMILIES[family].write(tmp_path)
    episode = exactness.episode

    def faulty(*arguments: object) -> object:
        inject(monkeypatch)
        return episode(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(exactness, "episode", faulty)
    with pytest.raises(AssertionError, match=r"(logits|tokens) of sequence"):
        fuzz(plan_for(FAMILIES[family], tmp_path, tokens=2000, changes=200))
