"""Mask rows of a pass: chains of masks after possible ends of the accepted path (SPACE, 2402.11809).

A mask stands for a token not drawn yet, and the row at position t predicts the token at t + 1: masks after the accepted
path's end predict the tokens after the round's own next token. To attention, a chain of masks is a branch of the tree;
no other row attends to it, and it is never accepted. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from coppice.core.tree import ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class MaskGroup:
    """A chain of `num_masks` masks after a node of the tree or its root."""

    node: int
    num_masks: int


@dataclass(frozen=True, slots=True)
class MaskShape:
    """Upper bounds of masks per group and of groups per round."""

    num_masks: int
    num_groups: int

    @property
    def max_rows(self) -> int:
        """Largest number of mask rows of a round."""
        return self.num_masks * self.num_groups


def mask_parents(groups: Sequence[MaskGroup], num_nodes: int) -> tuple[int, ...]:
    """Parents of all mask rows, group by group, numbered after the tree's nodes."""
    parents: list[int] = []
    for group in groups:
        first = num_nodes + len(parents)
        parents += [group.node, *range(first, first + group.num_masks - 1)]
    return tuple(parents)


def mask_depths(groups: Sequence[MaskGroup], depths: Sequence[int]) -> list[int]:
    """Depths of all mask rows, given the nodes' `depths`."""
    return [
        (0 if group.node == ROOT else depths[group.node]) + place
        for group in groups
        for place in range(1, group.num_masks + 1)
    ]


def masks_for(groups: Sequence[MaskGroup], tree: TokenTree, end: int) -> tuple[list[int], list[int]]:
    """Masks that predict the tokens after the round's own token: rows, and positions in their groups.

    One per depth of a draft, from the nearest group that has it: the end's own group or that of an ancestor, whose
    first masks, one per node in between, stand for tokens known by now.

    Args:
        groups: of the round; rows are numbered from 0, group by group.
        tree: the verified tree.
        end: last node of the accepted path.
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
