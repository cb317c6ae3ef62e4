"""The sharing of one pass's rows and free blocks among the sequences that are ready for it."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

# For types alone: the simulator follows this rule where there is no torch.
if TYPE_CHECKING:
    from verifier_svc.engine.sequence import Sequence as RunningSequence
    from verifier_svc.engine.sequence import SequenceKey

# Prompts are sure of one row in this many: the rounds of many sequences cannot starve them.
PROMPT_SHARE = 4
# Trees and the prompts that wait share so many rows, or as many as a pass costs by itself. With more, a pass would keep
# the requests that come next waiting, and commit so many tokens that as many requests come at once.
SHARED_ROWS = 64
# Where rows cost next to nothing, it is no more than so many chunks: what waits has to become less.
MOST_CHUNKS = 4
# However many prompts wait, trees may make a pass longer by one part in so many. For a few sequences that is all that
# they want.
SLACK = 32

Ready: TypeAlias = "Sequence[tuple[SequenceKey, RunningSequence]]"


@dataclass(frozen=True, slots=True)
class RowAllotment:
    """What one sequence brings to a pass: its next `num_pending` tokens, and at most `max_nodes` of its draft.

    Behind these, at most `max_masks` masks.
    """

    key: SequenceKey
    sequence: RunningSequence
    num_pending: int
    max_nodes: int
    max_masks: int = 0

    @property
    def num_rows(self) -> int:
        """Rows at most."""
        return self.num_pending + self.max_nodes + self.max_masks

    @property
    def num_missing_blocks(self) -> int:
        """Free blocks that it takes."""
        return self.sequence.residence.cache.num_missing(self.num_rows)

    def within_blocks(self) -> RowAllotment:
        """The share with a tree that takes no block of its own."""
        room = self.sequence.residence.cache.room_behind(self.num_pending)
        return replace(self, max_nodes=min(self.max_nodes, room))


def share_rows(ready: Ready, *, prefill_chunk: int, max_rows: int, own_rows: float) -> list[RowAllotment]:
    """Share at most `max_rows` rows (0: no limit) among sequences, of which the first has waited longest.

    Every round gets the row of its root. Then come prompts, at most one chunk all together, so that a long prompt
    delays the others by one chunk at a time. Trees come last, and get less the more prompt tokens wait. `own_rows` take
    as long as a pass does by itself.
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
    """Keep the `room` nodes of all trees whose paths are likeliest; of equals, as many of each tree.

    A sampled tree is kept whole or not at all, which sizes decide and nothing that was drawn: those that have waited
    longest, as far as they fit, and into half of the room where other trees want some, too.
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
    """Cut trees, those of the last in rank first, until the free blocks are enough or no tree takes one any more."""
    lacking = sum(share.num_missing_blocks for share in shares) - num_free_blocks
    cut: dict[SequenceKey, RowAllotment] = {}
    for share in sorted(shares, key=lambda share: share.sequence.rank, reverse=True):
        if lacking <= 0:
            break
        cut[share.key] = share.within_blocks()
        lacking -= share.num_missing_blocks - cut[share.key].num_missing_blocks
    return [cut.get(share.key, share) for share in shares]


# Rows that take so many parts of the time of a pass by itself are next to nothing, up to a number of them.
OWN_PART = 4
MOST_FREE_ROWS = 4 * SHARED_ROWS
# A pass over one prompt alone may have a mask for each of so many tokens.
PROMPT_PART = 8


def deal_masks(
    shares: Sequence[RowAllotment], *, free_rows: int, own_rows: float, max_rows: int = 0
) -> list[RowAllotment]:
    """Give masks to those who can use them, one group to each, then a second; none where a pass is full.

    They are the last to get rows, and only rows that cost next to nothing: a number of rows that the kernels compute in
    about the time of one, and, once it is known what passes cost, rows that make a pass longer by a quarter. A prompt
    that is alone may grow by an eighth for its first draft.

    Args:
        shares: of all sequences.
        free_rows: rows of a pass that cost next to nothing, before it is known what they cost.
        own_rows: rows that take as long as a pass does by itself; 0 while that is unknown.
        max_rows: of a pass; 0 for no limit.
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
    """Whether a token comes out of it at all."""
    return share.num_pending == share.sequence.num_pending


def _likeliest(trees: Sequence[Sequence[float]], room: int) -> list[int]:
    """How many nodes of each tree are among the `room` likeliest of all; each tree's values are in descending order."""
    sizes = [len(values) for values in trees]
    if sum(sizes) <= room:
        return sizes
    values = np.array([value for tree in trees for value in tree])
    places = np.array([place for size in sizes for place in range(size)])
    owners = np.repeat(np.arange(len(trees)), sizes)
    likeliest = np.lexsort((places, -values))[:room]
    counts: list[int] = np.bincount(owners[likeliest], minlength=len(trees)).tolist()
    return counts
