"""Best tree from one distribution per position. Pure: depends on neither models nor noise.

All nodes of a depth have the same children, so the search runs over ranks: it yields paths in order of probability,
with two candidates per node taken.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from coppice.core.tree import ROOT, TokenTree
from coppice.search.tree_limits import Children, TreeLimits


def marginal_tree(marginals: Sequence[Children], limits: TreeLimits, source: str) -> TokenTree:
    """The likeliest `limits.max_nodes` paths, where children of nodes at depth d are `marginals[d]` (root: depth 0).

    Limits on steps do not apply: no forward passes are made.
    """
    # Entries: negated path log-probability, the parent's depth, rank among siblings, parent, and the parent's path
    # log-probability. Ties go to the smaller depth, so parents come first.
    candidates: list[tuple[float, int, int, int, float]] = []

    def propose(depth: int, rank: int, parent: int, above: float) -> None:
        if depth < len(marginals) and rank < len(marginals[depth].log_probs):
            value = above + marginals[depth].log_probs[rank]
            if value >= limits.min_fill_log_prob:
                heapq.heappush(candidates, (-value, depth, rank, parent, above))

    token_ids: list[int] = []
    parents: list[int] = []
    log_probs: list[float] = []
    num_worth = 0
    propose(0, 0, ROOT, 0.0)
    while candidates and len(token_ids) < limits.max_nodes:
        negative, depth, rank, parent, above = heapq.heappop(candidates)
        node = len(token_ids)
        token_ids.append(marginals[depth].token_ids[rank])
        parents.append(parent)
        log_probs.append(marginals[depth].log_probs[rank])
        num_worth += -negative >= limits.min_path_log_prob
        propose(depth, rank + 1, parent, above)
        propose(depth + 1, 0, node, -negative)
    kept = limits.num_kept(num_worth, len(token_ids))
    return TokenTree(tuple(token_ids[:kept]), tuple(parents[:kept]), tuple(log_probs[:kept]), (source,))
