"""Best tree from one distribution per position and a transition between neighbours. No torch."""

from __future__ import annotations

import numpy as np

from coppice.core.tree import TokenTree
from coppice.kernels.cpu.transition_search import Bounds, Tables, search, search_behind_token
from coppice.search.likeliest_tokens import FloatArray
from coppice.search.transition_scores import TransitionScores
from coppice.search.tree_limits import Children, TreeLimits


def transition_tree(
    root: Children | int,
    transition: TransitionScores,
    scores: FloatArray,
    sigmas: FloatArray,
    limits: TreeLimits,
    max_children: int,
    source: str,
) -> TokenTree:
    """The likeliest `limits.max_nodes` nodes by path probability.

    Args:
        root: the root's children; or its token, if the transition is to give them.
            transition: contribution of a token to the scores of the next.
            scores: scores by depth, without the preceding token [depths, vocab]: from the root's grandchildren on, or
            from its
                children on if these are not given.
        sigmas: scales by depth [depths].
        limits: of the search; limits on steps do not apply, and depth is bounded by `scores`.
        max_children: most children of a node.
        source: source of the tree.
    """
    tables = Tables(scores, sigmas, transition.before, transition.behind_halves)
    bounds = Bounds(limits.max_nodes, max_children, float(limits.min_path_log_prob), float(limits.min_fill_log_prob))
    if isinstance(root, Children):
        children = np.array(root.token_ids, np.int64), np.array(root.log_probs, np.float32)
        found = search(*children, 0, tables, bounds)
    else:
        found = search_behind_token(root, tables, bounds)
    token_ids, parents, log_probs, paths = (values.tolist() for values in found)
    num_worth = sum([path >= limits.min_path_log_prob for path in paths])
    kept = limits.num_kept(num_worth, len(token_ids))
    return TokenTree(tuple(token_ids[:kept]), tuple(parents[:kept]), tuple(log_probs[:kept]), (source,))
