"""The best tree from one distribution per position. Pure: knows neither models nor noise.

The children of a node are then the same for all nodes of its depth, so that the search is one over ranks: it yields
paths in exactly the order of their probability, with two candidates for each node that it takes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from coppice.core.tree import ROOT, TokenTree
from coppice.search.tree_limits import Children, TreeLimits


def marginal_tree(marginals: Sequence[Children], limits: TreeLimits, source: str) -> TokenTree:
    """The likeliest `limits.max_nodes` paths, where the children of every node at depth d are `marginals[d]`.

    The root is at depth 0. Of the limits, those of steps do not apply: nothing is computed here.
    """
    # By falling path log-probability: it, the depth of the node's parent, its rank among its siblings, its parent and
    # that one's path log-probability. Of equals the one nearer to the root comes first, as parents must.
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
