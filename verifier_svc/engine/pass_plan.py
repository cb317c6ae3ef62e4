"""Plan of one pass: rows of many sequences packed into one batch, and the visibility among them.

A sequence's rows are its pending tokens (committed, not in the cache yet; the last of them is the root), its tree,
and its masks. Plain decoding has an empty tree, prefill many pending tokens. To attention, masks are nodes with only
masks as descendants; their keys and values are overwritten by the next pass, since no accepted path contains any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree
from verifier_svc.engine.kv_cache import IntArray, SequenceCache, slot_list, slots_of
from verifier_svc.extras.redraft.groups import MaskGroup, mask_depths, mask_parents
from verifier_svc.verify.draw_rule import DrawRule

if TYPE_CHECKING:
    from verifier_svc.verify.token_choice import TokenChooser

# In strict mode passes have a multiple of this many rows, since matrix kernels compute fewer rows differently; or of
# fewer, if tested to be exact, see row_multiple.py.
ROW_MULTIPLE = 4
# Sizes are multiples up to this many multiples; the step doubles with every doubling beyond. Matrix kernels keep
# machine code for each size, about a MiB per shape of weights.
FINE_STEPS = 32
# Offset of position ids for texts with long rope factors, see rope_regimes.py; above every context, within 32 bits.
LONG_OFFSET = 1 << 30


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's rows of a pass: pending tokens, the tree after the last of them, then masks after both.

    `wants_logits` is false for part of a prompt with more to come. Without a `draw_rule` no node is pruned early.
    `wants_states`: the hidden states before the output layer are needed too. With a `chooser` the pass draws the tokens
    of the root's and the tree's rows; `keeps_logits`: the rows' logits are needed nevertheless. `shown` are the pending
    rows before the last whose states are needed as well.
    """

    cache: SequenceCache
    pending: Sequence[int]
    tree: TokenTree = EMPTY_TREE
    wants_logits: bool = True
    masks: tuple[MaskGroup, ...] = ()
    draw_rule: DrawRule | None = None
    wants_states: bool = False
    chooser: TokenChooser | None = None
    keeps_logits: bool = True
    shown: range = range(0)

    def __len__(self) -> int:
        return len(self.pending) + len(self.tree) + self.num_masks

    @property
    def num_masks(self) -> int:
        """Number of mask rows."""
        return sum([group.num_masks for group in self.masks])


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, stop) of a pass, and their visible keys.

    A row attends to the sequence's first `num_context` tokens, which are in the cache, and among the segment's own
    rows: a pending token to all up to itself, a node to all pending ones, its ancestors and itself. `parents` are those
    of the tree's nodes, then of masks. Row i is written to position `num_context` + i of the sequence with block table
    `table`, or to `num_context` + `places[i]` after pruning. `positions` are those in the text, `is_long` its rope
    factors. `state` is the slot of its recurrent states after the context, and `borders` are pending rows after which
    these are kept in slots of their own.
    """

    start: int
    stop: int
    num_context: int
    num_pending: int
    parents: tuple[int, ...]
    positions: IntArray
    table: IntArray
    places: IntArray | None = None
    is_long: bool = False
    state: int = -1
    borders: tuple[tuple[int, int], ...] = ()

    @property
    def row_places(self) -> IntArray:
        """Offsets of the rows after the context."""
        return np.arange(self.stop - self.start) if self.places is None else self.places

    def slots(self, first: int, last: int) -> IntArray:
        """Slots of the sequence's positions in [first, last)."""
        return slots_of(self.table, np.arange(first, last))


@dataclass(frozen=True, slots=True)
class PassPlan:
    """A packed batch of rows for the model, and the slots of their keys and values.

    `token_ids` and `positions` [N] may end in padding rows; `write_slots` has one entry per real row. Logits are
    computed for `logit_rows` [K]; those of sequence i are in `logit_ranges[i]`. `mask_places` [N] are positions of
    masks in their groups, from 0, and -1 for other rows; None without masks. `draw_rules` has one entry per segment.
    `wants_states`: hidden states of the logit rows are needed, and then those of `shown_rows` [M]; those of sequence i
    are in `shown_ranges[i]`.
    """

    token_ids: IntArray
    positions: IntArray
    write_slots: IntArray
    segments: tuple[Segment, ...]
    logit_rows: IntArray
    logit_ranges: tuple[tuple[int, int], ...]
    num_rows: int
    mask_places: IntArray | None = None
    draw_rules: tuple[DrawRule | None, ...] = ()
    wants_states: bool = False
    shown_rows: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    shown_ranges: tuple[tuple[int, int], ...] = ()

    @property
    def position_ids(self) -> IntArray:
        """Position ids for the model [N]: `positions`, raised by LONG_OFFSET for texts with long rope factors."""
        long = [segment for segment in self.segments if segment.is_long]
        if not long:
            return self.positions
        position_ids = self.positions.copy()
        for segment in long:
            position_ids[segment.start : segment.stop] += LONG_OFFSET
        return position_ids


def visibility(num_pending: int, parents: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Visibility among a segment's rows [rows, rows]: pending tokens causally, nodes their ancestors only."""
    size = num_pending + len(parents)
    visible = np.zeros((size, size), dtype=np.bool_)
    visible[:num_pending, :num_pending] = np.tri(num_pending, dtype=np.bool_)
    for node, parent in enumerate(parents):
        row = num_pending + node
        above = num_pending - 1 if parent == ROOT else num_pending + parent
        visible[row] = visible[above]
        visible[row, row] = True
    return visible


def padded_size(num_rows: int, row_multiple: int) -> int:
    """Rows of a pass with padding: less than a sixteenth if more than a multiple's."""
    step = row_multiple << max(0, (num_rows - 1).bit_length() - (FINE_STEPS * row_multiple - 1).bit_length())
    return -(-num_rows // step) * step


def padded_sizes(max_rows: int, row_multiple: int) -> list[int]:
    """All sizes of passes of up to `max_rows` rows, ascending."""
    sizes = []
    size = 0
    while size < max_rows:
        size = padded_size(size + 1, row_multiple)
        sizes.append(size)
    return sizes


def plan_pass(work: Sequence[SequenceRows], *, row_multiple: int) -> PassPlan:
    """Lay out a pass over every sequence's rows.

    Raises:
        OverloadedError: no block is free for a sequence's rows.
    """
    # Lists until the end: after a wait all caches are cold, and each kind of array operation costs more than the few
    # numbers of a round.
    token_ids: list[int] = []
    places: list[int] = []
    write_slots: list[int] = []
    logit_rows: list[int] = []
    logit_ranges: list[tuple[int, int]] = []
    bounds: list[tuple[int, int]] = []
    shown_rows: list[int] = []
    shown_ranges: list[tuple[int, int]] = []
    for rows in work:
        rows.cache.reserve(len(rows))
        context, num_pending = rows.cache.length, len(rows.pending)
        start, stop = len(token_ids), len(token_ids) + len(rows)
        token_ids += rows.pending
        token_ids += rows.tree.token_ids
        places += range(context, context + num_pending)
        places += [context + num_pending - 1 + depth for depth in rows.tree.depths]
        if rows.masks:
            token_ids += [0] * rows.num_masks
            places += [context + num_pending - 1 + depth for depth in mask_depths(rows.masks, rows.tree.depths)]
        write_slots += slot_list(rows.cache.table, context, context + len(rows))
        bounds.append((start, stop))
        first = len(logit_rows)
        if rows.wants_logits:
            logit_rows += range(start + num_pending - 1, stop)
        logit_ranges.append((first, len(logit_rows)))
        first = len(shown_rows)
        shown_rows += [start + row for row in rows.shown]
        shown_ranges.append((first, len(shown_rows)))
    num_rows = len(token_ids)
    padding = [0] * (padded_size(num_rows, row_multiple) - num_rows)
    # Padded logit rows repeat a real one: the output layer needs the row multiple too.
    logit_padding = logit_rows[-1:] * (padded_size(len(logit_rows), row_multiple) - len(logit_rows))
    positions = np.array(places + padding, np.int64)
    segments = [
        Segment(
            start=start,
            stop=stop,
            num_context=rows.cache.length,
            num_pending=len(rows.pending),
            parents=rows.tree.parents + mask_parents(rows.masks, len(rows.tree)),
            positions=positions[start:stop],
            table=rows.cache.table,
            is_long=rows.cache.is_long,
            state=rows.cache.state,
            borders=rows.cache.plan_borders(len(rows.pending)),
        )
        for rows, (start, stop) in zip(work, bounds, strict=True)
    ]
    return PassPlan(
        token_ids=np.array(token_ids + padding, np.int64),
        positions=positions,
        write_slots=np.array(write_slots, np.int64),
        segments=tuple(segments),
        logit_rows=np.array(logit_rows + logit_padding, np.int64),
        logit_ranges=tuple(logit_ranges),
        num_rows=num_rows,
        mask_places=_mask_places(work, bounds, len(token_ids) + len(padding)),
        draw_rules=tuple([rows.draw_rule for rows in work]),
        wants_states=bool(shown_rows) or any(rows.wants_states and rows.wants_logits for rows in work),
        shown_rows=np.array(shown_rows, np.int64),
        shown_ranges=tuple(shown_ranges),
    )


def moved(plan: PassPlan, starts: Sequence[int]) -> PassPlan:
    """A plan for probes: texts without context as if each began at a given position."""
    positions = plan.positions.copy()
    segments = []
    for segment, start in zip(plan.segments, starts, strict=True):
        positions[segment.start : segment.stop] += start
        segments.append(replace(segment, positions=positions[segment.start : segment.stop]))
    return replace(plan, positions=positions, segments=tuple(segments))


def _mask_places(work: Sequence[SequenceRows], bounds: Sequence[tuple[int, int]], num_rows: int) -> IntArray | None:
    if not any(rows.masks for rows in work):
        return None
    places = np.full(num_rows, -1, np.int64)
    for rows, (_, stop) in zip(work, bounds, strict=True):
        own = [place for group in rows.masks for place in range(group.num_masks)]
        places[stop - len(own) : stop] = own
    return places
