"""The best tree of what has been read already. Pure: knows neither models nor noise."""

from __future__ import annotations

import heapq
from typing import Protocol

from coppice.core.tree import ROOT, TokenTree
from coppice.search.tree_limits import Children, TreeLimits


class KnownRows(Protocol):
    """Rows that were read, and what is expected behind each."""

    def find(self, parent_row: int, token_id: int) -> int | None:
        """The row of a node that was read."""
        ...

    def children(self, row: int) -> Children:
        """What is expected behind a row; -1 is the end of the committed tokens."""
        ...


def known_tree(known: KnownRows, top: int, limits: TreeLimits, source: str) -> TokenTree:
    """The likeliest `max_nodes` nodes behind the row `top`, of those whose parents were read; likeliest first.

    It is the tree that `build_tree` finds where no step has to pay, but takes about as long as it has nodes: a node's
    next sibling and its first child are looked at when it is taken, and no others. Of `limits`, those of steps and of
    rows mean nothing here.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    log_probs: list[float] = []
    least, most = limits.min_path_log_prob, limits.max_nodes
    behind = known.children(top)
    # Minus the path's log-probability; then, for ties, the node's parent and its place among siblings. Behind these the
    # siblings, the row of their parent, their depth, and the log-probability of the path to there.
    heap: list[tuple[float, int, int, Children, int, int, float]] = []
    if behind.token_ids and limits.max_depth > 0:
        heap.append((-behind.log_probs[0], ROOT, 0, behind, top, 1, 0.0))
    while heap and len(token_ids) < most:
        value, parent, rank, siblings, parent_row, depth, above = heap[0]
        if -value < least:
            break
        token = siblings.token_ids[rank]
        node = len(token_ids)
        token_ids.append(token)
        parents.append(parent)
        log_probs.append(siblings.log_probs[rank])
        rank += 1
        if rank < len(siblings.token_ids):
            heapq.heapreplace(
                heap, (-(above + siblings.log_probs[rank]), parent, rank, siblings, parent_row, depth, above)
            )
        else:
            heapq.heappop(heap)
        row = known.find(parent_row, token) if depth < limits.max_depth else None
        if row is None:
            continue
        behind = known.children(row)
        if behind.token_ids:
            heapq.heappush(heap, (value - behind.log_probs[0], node, 0, behind, row, depth + 1, -value))
    return TokenTree(tuple(token_ids), tuple(parents), tuple(log_probs), (source,))
