"""Walks over the rows of a pass: each step begins at the state after its parent, in few scratch places."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.unit.verifier_svc.layers.forests import random_segments, segment
from verifier_svc.engine.pass_plan import Segment
from verifier_svc.kernels.triton.walks import Walks, tree_walks
from verifier_svc.layers.recurrence import NO_ROW, RowForest


def walks_over(segments: Sequence[Segment]) -> tuple[RowForest, Walks]:
    forest = RowForest(segments)
    border_of_row = np.full(forest.num_rows, -1)
    border_of_row[forest.border_rows] = forest.border_slots
    return forest, tree_walks(forest.starts, forest.num_pending, forest.slots, forest.parents, border_of_row)


def check(segments: Sequence[Segment]) -> None:
    """Take the steps with the numbers of rows for states."""
    forest, walks = walks_over(segments)
    seen: list[int] = []
    slots, after, scratch = {slot: ("slot", slot) for slot in range(9)}, {}, {}
    for walk, (first, last) in enumerate(zip(walks.starts[:-1], walks.starts[1:], strict=True)):
        state: object = NO_ROW
        for row, from_slot, from_after, from_scratch, to_slot, to_after, to_scratch in walks.steps[first:last].tolist():
            for place, states in ((from_slot, slots), (from_after, after), (from_scratch, scratch)):
                state = states[place] if place >= 0 else state
            slot, parent = int(forest.slots[walk]), int(forest.parents[row])
            assert state == (("slot", slot) if parent == NO_ROW and slot >= 0 else parent)
            state = row
            for place, states in ((to_slot, slots), (to_after, after), (to_scratch, scratch)):
                if place >= 0:
                    states[place] = state
            seen.append(row)
        assert after[walk] == forest.starts[walk] + forest.num_pending[walk] - 1
    assert sorted(seen) == list(range(forest.num_rows))
    assert {slots[slot] for slot in forest.border_slots.tolist()} == set(forest.border_rows.tolist())
    assert sorted(scratch) == list(range(walks.num_places))


@pytest.mark.parametrize("seed", range(20))
def test_a_step_begins_at_the_state_after_its_parent(seed: int) -> None:
    generator = np.random.default_rng(seed)
    sizes = [(int(generator.integers(1, 6)), int(generator.integers(0, 33))) for _ in range(5)]
    check(random_segments(generator, sizes))


def test_slots_are_read_first_and_written_at_borders() -> None:
    check([segment(0, 3, [-1, 0, 0, -1], state=4, num_context=9, borders=((0, 7), (2, 8))), segment(7, 1, state=2)])


def test_places_are_few() -> None:
    def num_places(parents: Sequence[int]) -> int:
        return walks_over([segment(0, 1, parents)])[1].num_places

    # A chain, children of the root, a chain with a leaf at each node, and a full binary tree of 31 nodes below a node.
    assert num_places(range(-1, 31)) == 0
    assert num_places([-1] * 32) == 0
    assert num_places([-1, *(node - node % 2 for node in range(31))]) == 1
    assert num_places([-1, *((node - 1) // 2 for node in range(1, 31))]) == 4
