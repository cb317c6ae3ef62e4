"""Trees whose nodes are draws from known distributions, as rejection rules require."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from coppice.core.draft_distribution import DraftDistribution
from coppice.core.errors import InvalidTreeError
from coppice.core.tree import ROOT, TokenTree


@dataclass(frozen=True)
class SampledTree:
    """Draft tokens, parents before children, siblings in the order of their draws.

    `distributions` of the root and then of each node are those its children were drawn from; None without children.
    Without replacement, a sibling is drawn from the rest of the distribution. With replacement, siblings may repeat a
    token.
    siblings may repeat a token, and each counts.

    Under a rejection rule such a tree must not be pruned, merged, re-ranked or selected from by its tokens: the nodes
    left would not be draws from these distributions.

    Raises:
        InvalidTreeError: arrays of different lengths, a parent that is not an earlier node, children without a
            distribution, or a child outside its parent's distribution.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    distributions: tuple[DraftDistribution | None, ...]
    with_replacement: bool = False

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        if len(self.parents) != count or len(self.distributions) != count + 1:
            raise InvalidTreeError(
                f"{count} token ids, {len(self.parents)} parents and {len(self.distributions)} distributions"
            )
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise InvalidTreeError(f"node {node} names parent {parent}, not an earlier node")
        for parent, children in enumerate(self.children, start=ROOT):
            self._check_draws(parent, [self.token_ids[child] for child in children])

    @classmethod
    def of(cls, tree: TokenTree) -> SampledTree:
        """The sampled tree that a message carries, drawn without replacement.

        Raises:
            InvalidTreeError: the tree lacks its distributions.
        """
        return cls(tree.token_ids, tree.parents, tree.distributions)

    def token_tree(self, source: str) -> TokenTree:
        """The tree for a message, drawn without replacement by `source`.

        Log-probabilities of nodes are those they were drawn with.
        """
        log_probs = [0.0] * len(self)
        for parent in range(ROOT, len(self)):
            for child, distribution in self.draws(parent):
                log_probs[child] = min(0.0, math.log(distribution.probability(self.token_ids[child])))
        return TokenTree(self.token_ids, self.parents, tuple(log_probs), (source,), (), self.distributions)

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of the root and then of each node, in the order of their draws."""
        children: list[list[int]] = [[] for _ in self.distributions]
        for node, parent in enumerate(self.parents):
            children[parent + 1].append(node)
        return tuple(map(tuple, children))

    def draws(self, node: int) -> Iterator[tuple[int, DraftDistribution]]:
        """Children of a node (or ROOT) in order, each with the distribution that it was drawn from."""
        distribution = self.distributions[node + 1]
        last = None
        for child in self.children[node + 1]:
            assert distribution is not None, "checked when the tree was built"
            if last is not None and not self.with_replacement:
                distribution = distribution.without(self.token_ids[last])
            yield child, distribution
            last = child

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root's child down to `node`; empty for ROOT."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def _check_draws(self, parent: int, tokens: list[int]) -> None:
        distribution = self.distributions[parent + 1]
        if not tokens:
            return
        if distribution is None:
            raise InvalidTreeError(f"node {parent} has children but no distribution")
        if not set(tokens) <= set(distribution.token_ids):
            raise InvalidTreeError(f"a child of node {parent} is not in its distribution")
        if not self.with_replacement and len(set(tokens)) != len(tokens):
            raise InvalidTreeError(f"node {parent} repeats a child, drawn without replacement")
