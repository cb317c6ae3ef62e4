"""Outcomes of a tree under verification that are worth drafting for. Pure: depends on neither models nor noise.

An outcome is an accepted path, from the root to any node, and a token that is not a child of its end. The drafter's
children of a node give its probability.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coppice.core.tree import ROOT, TokenTree
from coppice.search.tree_limits import Children


class LikelyOutcome(NamedTuple):
    """Accepted path that ends at node `end` (-1: none), the token after it, and their log-probability."""

    end: int
    token_id: int
    log_prob: float


@dataclass(frozen=True, slots=True)
class FanOut:
    """Tokens tried after an accepted path: `first` after the likeliest, then `ratio` times as many, at least one.

    Geometric, as the allotments in Saguaro (2603.03251).
    """

    first: int = 8
    ratio: float = 0.8

    def at(self, rank: int) -> int:
        """Tokens after the path of this rank, 0 being the likeliest."""
        return max(1, int(self.first * self.ratio**rank))


def own_path_log_probs(tree: TokenTree, children: Mapping[int, Children]) -> list[float]:
    """The drafter's own log-probability of each node's path, for trees that may have other sources.

    `children` are the drafter's children by node, -1 being the root. An unlisted token counts as the last listed one;
    after nodes not in `children` tokens count as certain.
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
    """At most `most` outcomes, likeliest first, of paths whose end is in `children`."""
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
            # Probability that exactly this path is accepted.
            ends.append((-sum(math.exp(one.log_prob) for one in bonus), node, bonus))
    chosen = [one for rank, (_, _, bonus) in enumerate(sorted(ends)) for one in bonus[: fan_out.at(rank)]]
    return sorted(chosen, key=lambda one: (-one.log_prob, one.end, one.token_id))[:most]
