"""What one pass computes: the rows of many sequences packed into one, with who may see whom.

A sequence's rows are its pending tokens (committed, not yet in the cache; the last of them is the root), then its
tree. Plain decoding is the same thing with an empty tree, a prompt is the same thing with many pending tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coppice.tree import EMPTY_TREE, ROOT, TokenTree
from verifier_svc.kv_cache import SequenceCache

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

    Keys are the sequence's committed tokens (`num_context` of them, visible to every row) and then the segment's own
    rows, of which row i sees column j where `visible[i, j]`. `visible` is None when there is a single row.
    """

    start: int
    stop: int
    read_slots: Tensor
    num_context: int
    visible: Tensor | None
    query_positions: Tensor
    key_positions: Tensor


@dataclass(frozen=True, slots=True)
class PassPlan:
    """One packed row of tokens for the model, and where its keys and values go.

    `token_ids` and `positions` [1, N] may end in padding rows; `write_slots` has one entry per real row.
    `logit_rows` [K] are the rows whose logits are computed; `logit_ranges[i]` is where sequence i finds its own.
    """

    token_ids: Tensor
    positions: Tensor
    write_slots: Tensor
    segments: tuple[Segment, ...]
    logit_rows: Tensor
    logit_ranges: tuple[tuple[int, int], ...]
    num_rows: int


def visibility(num_pending: int, tree: TokenTree) -> npt.NDArray[np.bool_]:
    """Which of a sequence's rows each row sees [rows, rows]: pending tokens causally, nodes their ancestors only."""
    size = num_pending + len(tree)
    visible = np.zeros((size, size), dtype=np.bool_)
    visible[:num_pending, :num_pending] = np.tri(num_pending, dtype=np.bool_)
    for node, parent in enumerate(tree.parents):
        row = num_pending + node
        above = num_pending - 1 if parent == ROOT else num_pending + parent
        visible[row] = visible[above]
        visible[row, row] = True
    return visible


def plan_pass(work: Sequence[SequenceRows], *, row_multiple: int, device: torch.device) -> PassPlan:
    """Lay out a pass over every sequence's rows.

    Raises:
        OverloadedError: the cache has no block left for a sequence's rows.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    write_slots: list[int] = []
    segments: list[Segment] = []
    logit_rows: list[int] = []
    logit_ranges: list[tuple[int, int]] = []
    for rows in work:
        start = len(token_ids)
        segment, slots, row_positions = _segment(rows, start, device)
        token_ids += [*rows.pending, *rows.tree.token_ids]
        positions += row_positions
        write_slots += slots
        segments.append(segment)
        first = len(logit_rows)
        if rows.wants_logits:
            logit_rows += range(start + len(rows.pending) - 1, segment.stop)
        logit_ranges.append((first, len(logit_rows)))
    num_rows = len(token_ids)
    padding = -num_rows % row_multiple
    # Padded logit rows repeat a real one: the output layer, too, wants a fixed multiple of rows.
    logit_padding = -len(logit_rows) % row_multiple if logit_rows else 0
    return PassPlan(
        token_ids=torch.tensor([token_ids + [0] * padding], device=device),
        positions=torch.tensor([positions + [0] * padding], device=device),
        write_slots=torch.tensor(write_slots, device=device),
        segments=tuple(segments),
        logit_rows=torch.tensor(logit_rows + logit_rows[-1:] * logit_padding, dtype=torch.long, device=device),
        logit_ranges=tuple(logit_ranges),
        num_rows=num_rows,
    )


def _segment(rows: SequenceRows, start: int, device: torch.device) -> tuple[Segment, list[int], list[int]]:
    context = rows.cache.length
    num_pending = len(rows.pending)
    slots = rows.cache.reserve(len(rows))
    root_position = context + num_pending - 1
    positions = [
        *range(context, context + num_pending),
        *(root_position + depth for depth in rows.tree.depths),
    ]
    own_positions = torch.tensor(positions)
    visible = torch.from_numpy(visibility(num_pending, rows.tree)) if len(rows) > 1 else None
    segment = Segment(
        start=start,
        stop=start + len(rows),
        read_slots=torch.cat([rows.cache.committed_slots, torch.tensor(slots)]).to(device),
        num_context=context,
        visible=None if visible is None else visible.to(device),
        query_positions=own_positions.to(device),
        key_positions=torch.cat([torch.arange(context), own_positions]).to(device),
    )
    return segment, slots, positions
