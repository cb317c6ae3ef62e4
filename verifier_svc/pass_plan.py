"""What one pass computes: the rows of many sequences packed into one, with who may see whom.

A sequence's rows are its pending tokens (committed, not yet in the cache; the last of them is the root), then its
tree. Plain decoding is the same thing with an empty tree, a prompt is the same thing with many pending tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coppice.tree import EMPTY_TREE, ROOT, TokenTree
from verifier_svc.kv_cache import IntArray, SequenceCache, slots_of

# In strict mode passes have a multiple of this many rows: matrix kernels treat fewer rows differently.
ROW_MULTIPLE = 4


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's share of a pass: pending tokens, then the tree behind the last of them.

    `wants_logits` is false for a part of a prompt that has more to come.
    """

    cache: SequenceCache
    pending: Sequence[int]
    tree: TokenTree = EMPTY_TREE
    wants_logits: bool = True

    def __len__(self) -> int:
        return len(self.pending) + len(self.tree)


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, stop) of a pass, and the keys that they may see.

    A row sees the sequence's first `num_context` tokens, which are in the cache, and of the segment's own rows: a
    pending token all up to itself, a node all pending ones, its ancestors and itself. Row i is written to position
    `num_context` + i of the sequence, whose blocks are `table`; `positions` are the places in the text that the model
    is told.
    """

    start: int
    stop: int
    num_context: int
    num_pending: int
    parents: tuple[int, ...]
    positions: IntArray
    table: IntArray

    def slots(self, first: int, last: int) -> IntArray:
        """Slots of the sequence's positions from `first` to before `last`."""
        return slots_of(self.table, np.arange(first, last))


@dataclass(frozen=True, slots=True)
class PassPlan:
    """One packed row of tokens for the model, and where its keys and values go.

    `token_ids` and `positions` [N] may end in padding rows; `write_slots` has one entry per real row.
    `logit_rows` [K] are the rows whose logits are computed; `logit_ranges[i]` is where sequence i finds its own.
    """

    token_ids: IntArray
    positions: IntArray
    write_slots: IntArray
    segments: tuple[Segment, ...]
    logit_rows: IntArray
    logit_ranges: tuple[tuple[int, int], ...]
    num_rows: int


def visibility(num_pending: int, parents: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Which of a segment's rows each row sees [rows, rows]: pending tokens causally, nodes their ancestors only."""
    size = num_pending + len(parents)
    visible = np.zeros((size, size), dtype=np.bool_)
    visible[:num_pending, :num_pending] = np.tri(num_pending, dtype=np.bool_)
    for node, parent in enumerate(parents):
        row = num_pending + node
        above = num_pending - 1 if parent == ROOT else num_pending + parent
        visible[row] = visible[above]
        visible[row, row] = True
    return visible


def plan_pass(work: Sequence[SequenceRows], *, row_multiple: int) -> PassPlan:
    """Lay out a pass over every sequence's rows.

    Raises:
        OverloadedError: the cache has no block left for a sequence's rows.
    """
    token_ids: list[int] = []
    segments: list[Segment] = []
    logit_rows: list[int] = []
    logit_ranges: list[tuple[int, int]] = []
    for rows in work:
        segment = _segment(rows, start=len(token_ids))
        token_ids += [*rows.pending, *rows.tree.token_ids]
        segments.append(segment)
        first = len(logit_rows)
        if rows.wants_logits:
            logit_rows += range(segment.start + len(rows.pending) - 1, segment.stop)
        logit_ranges.append((first, len(logit_rows)))
    num_rows = len(token_ids)
    padding = -num_rows % row_multiple
    # Padded logit rows repeat a real one: the output layer, too, wants a fixed multiple of rows.
    logit_padding = -len(logit_rows) % row_multiple if logit_rows else 0
    written = [segment.slots(segment.num_context, segment.num_context + len(segment.positions)) for segment in segments]
    return PassPlan(
        token_ids=np.array(token_ids + [0] * padding, np.int64),
        positions=np.concatenate([*(segment.positions for segment in segments), np.zeros(padding, np.int64)]),
        write_slots=np.concatenate(written),
        segments=tuple(segments),
        logit_rows=np.array(logit_rows + logit_rows[-1:] * logit_padding, np.int64),
        logit_ranges=tuple(logit_ranges),
        num_rows=num_rows,
    )


def _segment(rows: SequenceRows, start: int) -> Segment:
    rows.cache.reserve(len(rows))
    context, num_pending = rows.cache.length, len(rows.pending)
    root_position = context + num_pending - 1
    depths = np.array(rows.tree.depths, np.int64)
    return Segment(
        start=start,
        stop=start + len(rows),
        num_context=context,
        num_pending=num_pending,
        parents=rows.tree.parents,
        positions=np.concatenate([np.arange(context, context + num_pending), root_position + depths]),
        table=rows.cache.table,
    )
