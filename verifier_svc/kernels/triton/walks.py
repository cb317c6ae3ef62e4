"""Walks over the rows of a pass, for the Triton kernel of recurrences: in which order states follow from each other.

A program walks the rows of one segment with the state in registers. Before another child of an inner node the state
after it is read again, from a scratch place. Children with fewer descendants go first, and a place is free after the
last of them has begun: a segment needs at most log2(nodes) places (the numbers of Ershov, 1958).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verifier_svc.engine.kv_cache import IntArray

# Fields of a step: its row, and indices of the state before it in slots, in states after pending tokens and in scratch
# places, and of the state after it likewise; -1 for none.
STEP_FIELDS = 7
_NONE = -1


@dataclass(frozen=True, slots=True)
class Walks:
    """Steps [steps, STEP_FIELDS]; walk i has those from `starts[i]` to `starts[i + 1]`, and begins at a state of zeros.

    A step without a state before it continues from that after the previous one.
    """

    starts: IntArray
    steps: IntArray
    num_places: int


def tree_walks(
    starts: IntArray, num_pending: IntArray, slots: IntArray, parents: IntArray, border_of_row: IntArray
) -> Walks:
    """A walk for each segment of a pass.

    Args:
        starts: first rows of segments, and the number of rows [segments + 1].
        num_pending: rows of each segment's chain, which its nodes hang below [segments].
        slots: of the states before segments, -1 for none [segments].
        parents: of rows [rows].
        border_of_row: slots that keep the states after rows, or -1 [rows].
    """
    steps: list[tuple[int, ...]] = []
    bounds, num_places = [0], 0
    above = parents.tolist()
    for segment, slot in enumerate(slots.tolist()):
        start, stop = int(starts[segment]), int(starts[segment + 1])
        root = start + int(num_pending[segment]) - 1
        borders = border_of_row[start : root + 1].tolist()
        for row, border in enumerate(borders, start):
            before = slot if row == start else _NONE
            steps.append((row, before, _NONE, _NONE, border, segment if row == root else _NONE, _NONE))
        nodes, num_used = _node_steps(above, root, stop, segment, num_places)
        steps += nodes
        num_places += num_used
        bounds.append(len(steps))
    return Walks(np.array(bounds, np.int64), np.array(steps, np.int64).reshape(-1, STEP_FIELDS), num_places)


def path_walks(paths: Sequence[Sequence[int]], slots: Sequence[int]) -> Walks:
    """A walk for each path of rows, which begins at the state of a slot and writes that after its last row there."""
    steps = []
    for path, slot in zip(paths, slots, strict=True):
        for place, row in enumerate(path):
            before = slot if place == 0 else _NONE
            after = slot if place == len(path) - 1 else _NONE
            steps.append((row, before, _NONE, _NONE, after, _NONE, _NONE))
    bounds = np.cumsum([0, *map(len, paths)])
    return Walks(bounds, np.array(steps, np.int64).reshape(-1, STEP_FIELDS), 0)


def _node_steps(
    parents: Sequence[int], root: int, stop: int, segment: int, first_place: int
) -> tuple[list[tuple[int, ...]], int]:
    """Steps of the nodes below the row `root`, and the number of scratch places, which begin at `first_place`."""
    children: dict[int, list[int]] = {row: [] for row in range(root, stop)}
    sizes = dict.fromkeys(children, 1)
    for row in range(stop - 1, root, -1):
        children[parents[row]].append(row)
        sizes[parents[row]] += sizes[row]
    steps: list[tuple[int, ...]] = []
    places: dict[int, int] = {}
    free: list[int] = []
    num_places = 0
    previous, stack = root, sorted(children[root], key=sizes.__getitem__, reverse=True)
    while stack:
        row = stack.pop()
        parent, below = parents[row], sorted(children[row], key=sizes.__getitem__, reverse=True)
        after_pending = before = after = _NONE
        if parent != previous:
            after_pending, before = (segment, _NONE) if parent == root else (_NONE, places[parent])
        if before != _NONE and row == children[parent][-1]:
            free.append(before)
        if len(below) > 1:
            if not free:
                free.append(first_place + num_places)
                num_places += 1
            after = places[row] = free.pop()
        steps.append((row, _NONE, after_pending, before, _NONE, _NONE, after))
        children[row] = below[::-1]
        stack += below
        previous = row
    return steps, num_places
