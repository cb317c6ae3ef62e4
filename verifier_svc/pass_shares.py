"""How the rows and the free blocks of one pass are shared among the sequences that are ready for it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

# For types alone: the simulator follows this rule where there is no torch.
if TYPE_CHECKING:
    from verifier_svc.sequence import Sequence as RunningSequence
    from verifier_svc.sequence import SequenceKey

# Prompts are sure of one row in this many: neither trees nor the rounds of many sequences can starve them.
PROMPT_SHARE = 4

Ready: TypeAlias = "Sequence[tuple[SequenceKey, RunningSequence]]"


@dataclass(frozen=True, slots=True)
class Share:
    """What one sequence brings to a pass: its next `num_pending` tokens, and at most `max_nodes` of its draft."""

    key: SequenceKey
    sequence: RunningSequence
    num_pending: int
    max_nodes: int

    @property
    def num_missing_blocks(self) -> int:
        """Free blocks that it takes."""
        return self.sequence.residence.cache.num_missing(self.num_pending + self.max_nodes)

    def within_blocks(self) -> Share:
        """The share with a tree that takes no block of its own."""
        room = self.sequence.residence.cache.room_behind(self.num_pending)
        return replace(self, max_nodes=min(self.max_nodes, room))


def share_rows(ready: Ready, *, prefill_chunk: int, max_rows: int) -> list[Share]:
    """Share at most `max_rows` rows (0: no limit) among sequences, of which the first has waited longest.

    Rounds come first; their trees are cut evenly to what there is, and prompts get what is left, at most one chunk all
    together, so that a long prompt delays the others by one chunk at a time.
    """
    rounds = [item for item in ready if not item[1].is_prefilling]
    prompts = [item for item in ready if item[1].is_prefilling]
    left = max_rows or sys.maxsize
    num_pending = sum(sequence.num_pending for _, sequence in prompts)
    set_aside = min(num_pending, prefill_chunk, left // PROMPT_SHARE)
    shares = _share_among_rounds(rounds[: left - set_aside], left - set_aside)
    left -= sum(share.num_pending + share.max_nodes for share in shares)
    return shares + _share_among_prompts(prompts, prefill_chunk, left)


def cut_trees(shares: Sequence[Share], num_free_blocks: int) -> list[Share]:
    """Cut trees, those of the last in rank first, until the free blocks are enough or no tree takes one any more."""
    lacking = sum(share.num_missing_blocks for share in shares) - num_free_blocks
    cut: dict[SequenceKey, Share] = {}
    for share in sorted(shares, key=lambda share: share.sequence.rank, reverse=True):
        if lacking <= 0:
            break
        cut[share.key] = share.within_blocks()
        lacking -= share.num_missing_blocks - cut[share.key].num_missing_blocks
    return [cut.get(share.key, share) for share in shares]


def _share_among_rounds(rounds: Ready, max_rows: int) -> list[Share]:
    wanted = [sequence.num_nodes for _, sequence in rounds]
    most = _most_nodes(wanted, max_rows - len(rounds))
    return [Share(key, sequence, 1, min(nodes, most)) for (key, sequence), nodes in zip(rounds, wanted, strict=True)]


def _share_among_prompts(prompts: Ready, chunk: int, left: int) -> list[Share]:
    shares: list[Share] = []
    for key, sequence in prompts:
        pending = min(sequence.num_pending, chunk, left)
        if pending == 0:
            break
        chunk, left = chunk - pending, left - pending
        nodes = min(sequence.num_nodes, left) if pending == sequence.num_pending else 0
        left -= nodes
        shares.append(Share(key, sequence, pending, nodes))
    return shares


def _most_nodes(wanted: Iterable[int], room: int) -> int:
    """The most nodes that a tree may have so that trees of the `wanted` sizes have at most `room` together."""
    sizes = sorted(wanted)
    for index, size in enumerate(sizes):
        each = room // (len(sizes) - index)
        if size > each:
            return each
        room -= size
    return sizes[-1] if sizes else 0
