"""Mask rows of a pass: chains of masks behind ends that the accepted path may have (SPACE, 2402.11809).

A mask stands for a token that nobody has drawn yet, and the row at position t predicts the token at t + 1: so the masks
behind the accepted path's end say what follows the round's own next token. To attention a chain of masks is a branch of
the tree; no other row sees it, and it is never accepted. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from coppice.core.tree import ROOT, TokenTree


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


def masks_for(groups: Sequence[MaskGroup], tree: TokenTree, end: int) -> tuple[list[int], list[int]]:
    """The masks that say what follows the round's own token behind an accepted path: rows, and their places in groups.

    One for each depth of a draft, of the nearest group that has it: behind the end itself or behind a node above, where
    as many masks as there are nodes in between stand for tokens that are known by now.

    Args:
        groups: of the round; rows are numbered from 0 on, one group behind the other.
        tree: what the round has verified.
        end: the path's last node.
    """
    starts = itertools.accumulate((group.num_masks for group in groups), initial=0)
    by_node = {group.node: (start, group.num_masks) for start, group in zip(starts, groups, strict=False)}
    rows: list[int] = []
    places: list[int] = []
    node, distance = end, 0
    while True:
        start, num_masks = by_node.get(node, (0, 0))
        for place in range(distance + len(rows), num_masks):
            rows.append(start + place)
            places.append(place)
        if node == ROOT:
            return rows, places
        node, distance = tree.parents[node], distance + 1
