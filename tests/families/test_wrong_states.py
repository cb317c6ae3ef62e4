"""Wrong states are found: by the probe while loading, and by the crowd where they come later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from coppice.core.errors import IncompatibleError
from tests.families.checkpoints import FAMILIES, plan_for, write_additions
from tests.fuzz import exactness
from tests.fuzz.exactness import FuzzPlan, fuzz
from verifier_svc.config import VerifierConfig
from verifier_svc.engine.pass_plan import PassPlan, Segment
from verifier_svc.engine.state_slots import StateMoves
from verifier_svc.layers.linear_recurrence import LinearRecurrence
from verifier_svc.layers.recurrence import RecurrentStates, RowForest, StateCommit
from verifier_svc.model.loading import load_probed_target
from verifier_svc.model.target_model import TargetModel

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
        parents = layer._coming.parents
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


def follow_the_row_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a node that remains after pruning follow the row before it in place of its parent."""
    original = RowForest.__init__

    def causal(forest: RowForest, segments: list[Segment]) -> None:
        original(forest, segments)
        if any(segment.places is not None for segment in segments):
            forest.parents = np.where(forest.parents < 0, -1, np.arange(forest.num_rows) - 1)

    monkeypatch.setattr(RowForest, "__init__", causal)


def keep_pruned_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit rows counted after pruning in layers before the head, which have the pruned ones as well."""
    narrow = RecurrentStates.narrow

    def forgetful(states: RecurrentStates, plan: PassPlan) -> None:
        narrow(states, plan)
        if any(segment.places is not None for segment in plan.segments):
            for recurrence in states._recurrences:
                if isinstance(recurrence, LinearRecurrence):
                    recurrence.forest = recurrence._coming

    monkeypatch.setattr(RecurrentStates, "narrow", forgetful)


def count_rows_as_before_pruning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit rows counted before pruning, as far as there are so many, in layers after the head."""
    original = RowForest.__init__

    def unmapped(forest: RowForest, segments: list[Segment]) -> None:
        original(forest, segments)
        for place, remaining in forest._remaining.items():
            last = segments[place].stop - segments[place].start - 1
            forest._remaining[place] = {old: min(old, last) for old in remaining}

    monkeypatch.setattr(RowForest, "__init__", unmapped)


def keep_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commit a mask after the accepted rows, where a pass has masks."""
    begin, commits_of = TargetModel._begin, RowForest.commits_of
    had_masks = [False, False]

    def noted(target: TargetModel, plan: PassPlan, *moves: object) -> None:
        had_masks[:] = had_masks[1], plan.mask_places is not None
        begin(target, plan, *moves)  # type: ignore[arg-type]

    def with_mask(forest: RowForest, moves: StateMoves) -> list[StateCommit]:
        commits = commits_of(forest, moves)
        if not had_masks[0]:
            return commits
        last = forest.starts[1:] - 1
        return [replace(one, rows=(*one.rows, int(last[one.segment]))) for one in commits]

    monkeypatch.setattr(TargetModel, "_begin", noted)
    monkeypatch.setattr(RowForest, "commits_of", with_mask)


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
    find(inject, plan_for(FAMILIES[family], tmp_path, tokens=2000, changes=200), monkeypatch)


@pytest.mark.parametrize("family", ["lfm2", "qwen3.5"])
def test_the_probe_refuses_a_head_after_which_nodes_have_other_parents(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAMILIES[family].write(tmp_path / "model")
    head, _ = write_additions(tmp_path / "model", tmp_path)
    follow_the_row_before(monkeypatch)
    config = VerifierConfig(model=str(tmp_path / "model"), device="cpu", early_head=str(head))
    with pytest.raises(IncompatibleError, match="other logits once nodes are pruned"):
        load_probed_target(config)


@pytest.mark.parametrize(
    ("family", "inject"),
    [
        ("lfm2", follow_the_row_before),
        ("lfm2", count_rows_as_before_pruning),
        ("qwen3.5", follow_the_row_before),
        ("qwen3.5", keep_pruned_nodes),
        ("qwen3.5", count_rows_as_before_pruning),
        ("mamba", keep_pruned_nodes),
        ("mamba", count_rows_as_before_pruning),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_the_crowd_finds_wrong_states_of_pruned_passes(
    family: str, inject: Inject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAMILIES[family].write(tmp_path / "model")
    head, _ = write_additions(tmp_path / "model", tmp_path)
    plan = plan_for(FAMILIES[family], tmp_path / "model", tokens=2000, changes=200)
    find(inject, replace(plan, early_head=head), monkeypatch)


@pytest.mark.parametrize("family", ["lfm2", "qwen3.5"])
def test_the_crowd_finds_states_of_masks(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAMILIES[family].write(tmp_path / "model")
    _, adapter = write_additions(tmp_path / "model", tmp_path)
    plan = plan_for(FAMILIES[family], tmp_path / "model", tokens=2000, changes=200)
    find(keep_masks, replace(plan, space_adapter=adapter), monkeypatch)


def find(inject: Inject, plan: FuzzPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a crowd find a fault that comes after the model was loaded and the references were computed."""
    episode = exactness.episode

    def faulty(*arguments: object) -> object:
        inject(monkeypatch)
        return episode(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(exactness, "episode", faulty)
    with pytest.raises(AssertionError, match=r"(logits|tokens) of sequence"):
        fuzz(plan)
