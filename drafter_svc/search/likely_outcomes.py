"""The outcomes of a tree in verification that are worth drafting for. Pure: knows neither models nor noise.

An outcome of a tree is an accepted path, from the root down to any node, and a token that is no child where the path
ends. The drafter's own children of a node say how likely each is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coppice.core.tree import ROOT, TokenTree
from coppice.search.tree_limits import Children


class LikelyOutcome(NamedTuple):
    """The path that ends at node `end` (-1: nothing is accepted), then `token_id`; and the log of its probability."""

    end: int
    token_id: int
    log_prob: float


@dataclass(frozen=True, slots=True)
class FanOut:
    """How many tokens are tried behind an accepted path: `first` behind the likeliest, then `ratio` times as many.

    Behind every path at least one. Saguaro's (2603.03251) shares fall geometrically, too.
    """

    first: int = 8
    ratio: float = 0.8

    def at(self, rank: int) -> int:
        """Tokens behind the path of this rank, 0 being the likeliest."""
        return max(1, int(self.first * self.ratio**rank))


def own_path_log_probs(tree: TokenTree, children: Mapping[int, Children]) -> list[float]:
    """The drafter's log-probability of each node's path, whatever the tree says; the tree may have other sources.

    `children` are what the drafter expects behind nodes, -1 being the root. A token that is not listed there counts as
    the last one that is; behind a node that is not in `children`, tokens count as certain.
    """
    sums: list[float] = []
    listed = {node: dict(zip(one.token_ids, one.log_probs, strict=True)) for node, one in children.items()}
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        above = 0.0 if parent == ROOT else sums[parent]
        known = listed.get(parent)
        sums.append(above + (known.get(token, min(known.values())) if known else 0.0))
    return sums


def likely_outcomes(
    tree: TokenTree, children: Mapping[int, Children], fan_out: FanOut, most: int
) -> Sequence[LikelyOutcome]:
    """At most `most` outcomes, the likeliest first; those of paths whose end is in `children` alone."""
    paths = own_path_log_probs(tree, children)
    ends: list[tuple[float, int, list[LikelyOutcome]]] = []
    for node, found in children.items():
        above = 0.0 if node == ROOT else paths[node]
        bonus = [
            LikelyOutcome(node, token, above + log_prob)
            for token, log_prob in zip(found.token_ids, found.log_probs, strict=True)
            if (node, token) not in tree.children
        ]
        if bonus:
            # How likely the path is accepted that far and no further.
            ends.append((-sum(math.exp(one.log_prob) for one in bonus), node, bonus))
    chosen = [one for rank, (_, _, bonus) in enumerate(sorted(ends)) for one in bonus[: fan_out.at(rank)]]
    return sorted(chosen, key=lambda one: (-one.log_prob, one.end, one.token_id))[:most]
