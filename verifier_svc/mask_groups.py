"""Which mask rows a pass has: chains of masks behind ends that the accepted path may have (SPACE, 2402.11809).

A mask stands for a token that nobody has drawn yet, and the row at position t predicts the token at t + 1: so the masks
behind the accepted path's end say what follows the round's own next token. To attention a chain of masks is a branch of
the tree; no other row sees it, and it is never accepted. Pure.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from coppice.tree import ROOT, TokenTree

# Accepted tokens that a mask has to promise the next round: its row would cost more than less could gain.
LEAST_GAIN = 0.08


@dataclass(frozen=True, slots=True)
class MaskGroup:
    """`num_masks` masks, one behind the other, behind a node of the tree or its root."""

    node: int
    num_masks: int


@dataclass(frozen=True, slots=True)
class MaskShape:
    """Masks of a group, and groups of a round, at most."""

    num_masks: int
    num_groups: int

    @property
    def max_rows(self) -> int:
        """Rows of a round's masks at most."""
        return self.num_masks * self.num_groups


def mask_parents(groups: Sequence[MaskGroup], num_nodes: int) -> tuple[int, ...]:
    """Parents of all mask rows, numbered on from the tree's nodes, one group behind the other."""
    parents: list[int] = []
    for group in groups:
        first = num_nodes + len(parents)
        parents += [group.node, *range(first, first + group.num_masks - 1)]
    return tuple(parents)


def mask_depths(groups: Sequence[MaskGroup], depths: Sequence[int]) -> list[int]:
    """Depths of all mask rows, where the nodes have these."""
    return [
        (0 if group.node == ROOT else depths[group.node]) + place
        for group in groups
        for place in range(1, group.num_masks + 1)
    ]


def rows_behind(groups: Sequence[MaskGroup], node: int) -> range:
    """Which of all mask rows are those behind a node; none where it has no group."""
    starts = itertools.accumulate((group.num_masks for group in groups), initial=0)
    for start, group in zip(starts, groups, strict=False):
        if group.node == node:
            return range(start, start + group.num_masks)
    return range(0)


def choose_groups(
    tree: TokenTree, shape: MaskShape, max_rows: int, room: int, hit_rate: float
) -> tuple[MaskGroup, ...]:
    """Masks where they promise most, behind likely ends of the accepted path; the likeliest end's group comes first.

    The j-th mask behind an end promises the end's probability times `hit_rate` to the power of j.

    Args:
        tree: what the round verifies, whose own probabilities are believed.
        shape: of the groups, at most.
        max_rows: most rows of all masks together.
        room: tokens that the output may still have. What a mask predicts must be of use in the next round, which
            has a token of its own to add.
        hit_rate: how likely the token that a mask predicts is accepted if the one before it is.
    """
    ends = end_probabilities(tree)
    likeliest = sorted(range(ROOT, len(tree)), key=lambda node: (-ends[node], node))[: shape.num_groups]
    promises: list[tuple[float, int, int]] = []
    for rank, node in enumerate(likeliest):
        depth = 0 if node == ROOT else tree.depths[node]
        promise = ends[node]
        for place in range(min(shape.num_masks, room - depth - 2)):
            promise *= hit_rate
            if promise < LEAST_GAIN:
                break
            promises.append((-promise, rank, place))
    # Of equal promises the likelier end's comes first; a group's own fall from place to place.
    counts = Counter(rank for _, rank, _ in sorted(promises)[:max_rows])
    return tuple(MaskGroup(node, counts[rank]) for rank, node in enumerate(likeliest) if counts[rank])


def end_probabilities(tree: TokenTree) -> list[float]:
    """How likely the accepted path ends at each node; that of the root comes last, where its index of -1 finds it."""
    ends = [*map(math.exp, tree.path_log_probs), 1.0]
    # A node's own place holds its path's probability until all of its children have taken their part.
    for node, parent in enumerate(tree.parents):
        ends[parent] -= math.exp(tree.path_log_probs[node])
    return ends
