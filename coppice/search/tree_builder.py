"""Best-first trees in batched steps. Pure: depends on neither models nor noise."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from coppice.core.tree import ROOT, TokenTree
from coppice.search.tree_limits import Children, TreeLimits


class Frontier(NamedTuple):
    """Nodes to expand in one forward pass, as parallel lists.

    Rows are numbered through all frontiers of a tree. `parent_rows` are rows of earlier frontiers, or -1 for children
    of the root. `depths` starts at 1.
    """

    token_ids: list[int]
    parent_rows: list[int]
    depths: list[int]


Expand = Callable[[Frontier], Sequence[Children]]


def build_tree(root: Children, expand: Expand, limits: TreeLimits, source: str) -> TokenTree:
    """The likeliest `max_nodes` nodes by path probability among the children of the expanded nodes.

    Each step expands the likeliest unexpanded nodes in one call of `expand`, which returns the children of each
    row. A node is expanded only if its children could be among the best `max_nodes`.
    """
    search = _Search(limits)
    search.add(ROOT, root)
    for _ in range(limits.max_steps):
        nodes = search.next_nodes()
        if not nodes:
            break
        for node, children in zip(nodes, expand(search.frontier(nodes)), strict=True):
            search.add(node, children)
    return search.best_tree(source)


class _Search:
    """All candidates seen so far as parallel lists, parents before children."""

    def __init__(self, limits: TreeLimits) -> None:
        self._limits = limits
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._log_probs: list[float] = []
        self._path_log_probs: list[float] = []
        self._row_of: dict[int, int] = {ROOT: -1}
        # Unexpanded nodes, likeliest first.
        self._open: list[tuple[float, int]] = []
        # Path log-probabilities of the best `max_nodes` so far, worst first.
        self._best: list[float] = []

    def add(self, parent: int, children: Children) -> None:
        """Add the children of an expanded node that could be among the best."""
        depth = 1 if parent == ROOT else self._depths[parent] + 1
        path = 0.0 if parent == ROOT else self._path_log_probs[parent]
        for token, log_prob in zip(children.token_ids, children.log_probs, strict=True):
            value = path + log_prob
            if value < self._limits.min_fill_log_prob or not self._can_enter(value):
                break
            node = len(self._token_ids)
            self._token_ids.append(token)
            self._parents.append(parent)
            self._depths.append(depth)
            self._log_probs.append(log_prob)
            self._path_log_probs.append(value)
            heapq.heappush(self._best, value)
            if len(self._best) > self._limits.max_nodes:
                heapq.heappop(self._best)
            if depth < self._limits.max_depth:
                heapq.heappush(self._open, (-value, node))

    def next_nodes(self) -> list[int]:
        """Nodes to expand in the next step; empty if no step can improve the tree or pays."""
        nodes: list[int] = []
        gain = 0.0
        while self._open and len(nodes) < self._limits.width and self._is_worth_expanding(-self._open[0][0]):
            value, node = heapq.heappop(self._open)
            nodes.append(node)
            gain += math.exp(-value)
        return nodes if gain >= self._limits.min_step_gain else []

    def frontier(self, nodes: Sequence[int]) -> Frontier:
        """Assign rows to the nodes."""
        parent_rows = [self._row_of[self._parents[node]] for node in nodes]
        first = len(self._row_of) - 1
        self._row_of.update({node: first + offset for offset, node in enumerate(nodes)})
        return Frontier([self._token_ids[node] for node in nodes], parent_rows, [self._depths[node] for node in nodes])

    def best_tree(self, source: str) -> TokenTree:
        """The best candidates; ties go to the earlier one, so parents precede children."""
        num_worth = sum(path >= self._limits.min_path_log_prob for path in self._path_log_probs)
        ranked = sorted(range(len(self._token_ids)), key=lambda node: (-self._path_log_probs[node], node))
        kept = sorted(ranked[: self._limits.num_kept(num_worth, len(ranked))])
        renumbered = {ROOT: ROOT, **{old: new for new, old in enumerate(kept)}}
        return TokenTree(
            token_ids=tuple(self._token_ids[node] for node in kept),
            parents=tuple(renumbered[self._parents[node]] for node in kept),
            log_probs=tuple(self._log_probs[node] for node in kept),
            source_names=(source,),
        )

    def _is_worth_expanding(self, value: float) -> bool:
        return value >= self._limits.min_path_log_prob and self._can_enter(value)

    def _can_enter(self, value: float) -> bool:
        """Whether a new node of at most this path log-probability could be among the best."""
        return len(self._best) < self._limits.max_nodes or value > self._best[0]
