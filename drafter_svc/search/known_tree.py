"""Best tree of rows already read. Pure: depends on neither models nor noise."""

from __future__ import annotations

import heapq
from typing import Protocol

from coppice.core.tree import ROOT, TokenTree
from coppice.search.tree_limits import Children, TreeLimits


class KnownRows(Protocol):
    """Rows already read, and their children."""

    def find(self, parent_row: int, token_id: int) -> int | None:
        """Row of a node that was read."""
        ...

    def children(self, row: int) -> Children:
        """Children of a row; -1 is the end of the committed tokens."""
        ...


def known_tree(known: KnownRows, top: int, limits: TreeLimits, source: str) -> TokenTree:
    """Likeliest `max_nodes` nodes after the row `top`, among children of rows already read; likeliest first.

    Equal to the tree of `build_tree` if steps need not pay, but in time proportional to its nodes: only a taken node's
    next sibling and first child are considered. Limits on steps and rows are ignored.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    log_probs: list[float] = []
    least, most = limits.min_path_log_prob, limits.max_nodes
    behind = known.children(top)
    # Negated path log-probability; for ties, the parent and rank; then siblings, their parent's row, depth, and the
    # path log-probability of the parent.
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
