"""Random passes for recurrent layers: segments with pending tokens and trees, and each row's path."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verifier_svc.engine.pass_plan import Segment
from verifier_svc.layers.recurrence import NO_ROW, RowForest

_NO_BLOCKS = np.empty(0, np.int64)


def segment(
    start: int,
    num_pending: int,
    parents: Sequence[int] = (),
    *,
    state: int = 0,
    num_context: int = 0,
    borders: tuple[tuple[int, int], ...] = (),
) -> Segment:
    """Rows of one sequence; `parents` are those of its nodes, -1 for children of the root."""
    stop = start + num_pending + len(parents)
    return Segment(
        start=start,
        stop=stop,
        num_context=num_context,
        num_pending=num_pending,
        parents=tuple(parents),
        positions=np.arange(num_context, num_context + stop - start),
        table=_NO_BLOCKS,
        state=state,
        borders=borders,
    )


def random_parents(generator: np.random.Generator, num_nodes: int) -> list[int]:
    """Parents of a tree's nodes in topological order."""
    return [int(generator.integers(-1, node)) if node else -1 for node in range(num_nodes)]


def random_segments(
    generator: np.random.Generator, sizes: Sequence[tuple[int, int]], first_state: int = 0
) -> list[Segment]:
    """One segment per pair of pending tokens and nodes, without a context, in slots from `first_state` on."""
    segments: list[Segment] = []
    for place, (num_pending, num_nodes) in enumerate(sizes):
        start = segments[-1].stop if segments else 0
        parents = random_parents(generator, num_nodes)
        segments.append(segment(start, num_pending, parents, state=first_state + place))
    return segments


def path_to(forest: RowForest, row: int) -> list[int]:
    """Rows from a segment's first to this one."""
    path = [row]
    while (parent := int(forest.parents[path[-1]])) != NO_ROW:
        path.append(parent)
    return path[::-1]
