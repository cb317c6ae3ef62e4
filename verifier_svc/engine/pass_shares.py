"""Division of a pass's rows and free blocks among ready sequences."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

# For types only: the simulator uses this module without torch.
if TYPE_CHECKING:
    from verifier_svc.engine.sequence import Sequence as RunningSequence
    from verifier_svc.engine.sequence import SequenceKey

# Prompts get at least one row in this many, so that rounds cannot starve them.
PROMPT_SHARE = 4
# Rows shared by trees and waiting prompts, or as many as a pass's fixed cost if more. Larger trees would delay the next
# requests, and commit so many tokens that as many requests arrive at once.
SHARED_ROWS = 64
# If rows are nearly free, at most this many chunks, so that the backlog shrinks.
MOST_CHUNKS = 4
# Even with many waiting prompts, trees may lengthen a pass by one part in this many; enough for a few sequences.
SLACK = 32

Ready: TypeAlias = "Sequence[tuple[SequenceKey, RunningSequence]]"


@dataclass(frozen=True, slots=True)
class RowAllotment:
    """One sequence's share of a pass: its next `num_pending` tokens and up to `max_nodes` of its draft.

    After these, up to `max_masks` masks.
    """

    key: SequenceKey
    sequence: RunningSequence
    num_pending: int
    max_nodes: int
    max_masks: int = 0

    @property
    def num_rows(self) -> int:
        """Upper bound of rows."""
        return self.num_pending + self.max_nodes + self.max_masks

    @property
    def num_missing_blocks(self) -> int:
        """Free blocks that it needs."""
        return self.sequence.residence.cache.num_missing(self.num_rows)

    def within_blocks(self) -> RowAllotment:
        """The share with its tree cut to need no block of its own."""
        room = self.sequence.residence.cache.room_behind(self.num_pending)
        return replace(self, max_nodes=min(self.max_nodes, room))


def share_rows(ready: Ready, *, prefill_chunk: int, max_rows: int, own_rows: float) -> list[RowAllotment]:
    """Divide at most `max_rows` rows (0: no limit) among sequences, longest-waiting first.

    Every round gets its root's row. Prompts share one prefill chunk, so that a long prompt delays others by one chunk
    at a time. Trees come last, and get fewer rows the more prompt tokens wait. `own_rows` is a pass's fixed cost in
    rows.
    """
    rounds = [item for item in ready if not item[1].is_prefilling]
    prompts = [item for item in ready if item[1].is_prefilling]
    left = max_rows or sys.maxsize
    own_rows = min(own_rows, MOST_CHUNKS * prefill_chunk)
    num_waiting = sum(sequence.num_pending for _, sequence in prompts)
    set_aside = min(num_waiting, prefill_chunk, left // PROMPT_SHARE)
    shares = [RowAllotment(key, sequence, 1, sequence.num_nodes) for key, sequence in rounds[: left - set_aside]]
    left -= len(shares)
    for key, sequence in prompts:
        pending = min(sequence.num_pending, prefill_chunk, left)
        if pending == 0:
            break
        prefill_chunk, left = prefill_chunk - pending, left - pending
        nodes = sequence.num_nodes if pending == sequence.num_pending else 0
        shares.append(RowAllotment(key, sequence, pending, nodes))
    num_rows = sum(share.num_pending for share in shares)
    room = max(max(SHARED_ROWS, own_rows) - num_waiting, (own_rows + num_rows) / SLACK)
    return keep_likeliest(shares, math.floor(min(left, room)))


def keep_likeliest(shares: Sequence[RowAllotment], room: int) -> list[RowAllotment]:
    """Keep the `room` nodes of highest path probability over all trees; ties are shared equally.

    A sampled tree is kept whole or not at all, decided by size and not by content: longest-waiting first while they
    fit, in half of the room if other trees need some.
    """
    if sum(share.max_nodes for share in shares) <= room:
        return list(shares)
    sampled = [share for share in shares if share.max_nodes and share.sequence.traverses]
    others = [share for share in shares if share.max_nodes and not share.sequence.traverses]
    kept: dict[SequenceKey, int] = {}
    left = room // 2 if others else room
    for share in sampled:
        kept[share.key] = share.max_nodes if share.max_nodes <= left else 0
        left -= kept[share.key]
    counts = _likeliest([share.sequence.node_log_probs for share in others], room - sum(kept.values()))
    kept.update(zip((share.key for share in others), counts, strict=True))
    return [RowAllotment(share.key, share.sequence, share.num_pending, kept.get(share.key, 0)) for share in shares]


def cut_trees(shares: Sequence[RowAllotment], num_free_blocks: int) -> list[RowAllotment]:
    """Cut trees, last in rank first, until free blocks suffice or no tree needs one."""
    lacking = sum(share.num_missing_blocks for share in shares) - num_free_blocks
    cut: dict[SequenceKey, RowAllotment] = {}
    for share in sorted(shares, key=lambda share: share.sequence.rank, reverse=True):
        if lacking <= 0:
            break
        cut[share.key] = share.within_blocks()
        lacking -= share.num_missing_blocks - cut[share.key].num_missing_blocks
    return [cut.get(share.key, share) for share in shares]


# Rows that cost at most one part in OWN_PART of a pass's fixed cost are nearly free, up to a number of them.
OWN_PART = 4
MOST_FREE_ROWS = 4 * SHARED_ROWS
# A pass with only one prompt may have one mask per this many tokens.
PROMPT_PART = 8


def deal_masks(
    shares: Sequence[RowAllotment], *, free_rows: int, own_rows: float, max_rows: int = 0
) -> list[RowAllotment]:
    """Assign masks in turns of one group per sequence; none in a full pass.

    Masks get rows last, and only nearly free ones: rows that the kernels compute in about the time of one, or, once the
    cost of passes is known, rows that lengthen a pass by a quarter. A pass with one prompt alone may grow by an eighth
    for its first draft.

    Args:
        shares: of all sequences.
        free_rows: nearly free rows of a pass before its cost is known.
        own_rows: fixed cost of a pass in rows; 0 if unknown.
        max_rows: upper bound of the pass's rows; 0 for no limit.
    """
    num_rows = sum(share.num_rows for share in shares)
    limit = max(free_rows, int(min(own_rows / OWN_PART, MOST_FREE_ROWS)))
    if len(shares) == 1:
        limit = max(limit, num_rows + shares[0].num_pending // PROMPT_PART)
    left = (min(limit, max_rows) if max_rows else limit) - num_rows
    shapes = [share.sequence.mask_shape if _ends_prompt(share) else None for share in shares]
    masks = [0] * len(shares)
    for turn in range(max((shape.num_groups for shape in shapes if shape is not None), default=0)):
        for index, shape in enumerate(shapes):
            if left <= 0:
                break
            if shape is not None and turn < shape.num_groups:
                given = min(shape.num_masks, left)
                masks[index] += given
                left -= given
    return [replace(share, max_masks=count) if count else share for share, count in zip(shares, masks, strict=True)]


def _ends_prompt(share: RowAllotment) -> bool:
    """Whether the pass completes the prompt, so that a token is drawn."""
    return share.num_pending == share.sequence.num_pending


def _likeliest(trees: Sequence[Sequence[float]], room: int) -> list[int]:
    """Numbers of each tree's nodes among the `room` likeliest of all; trees' values are in descending order."""
    sizes = [len(values) for values in trees]
    if sum(sizes) <= room:
        return sizes
    values = np.array([value for tree in trees for value in tree])
    places = np.array([place for size in sizes for place in range(size)])
    owners = np.repeat(np.arange(len(trees)), sizes)
    likeliest = np.lexsort((places, -values))[:room]
    counts: list[int] = np.bincount(owners[likeliest], minlength=len(trees)).tolist()
    return counts
