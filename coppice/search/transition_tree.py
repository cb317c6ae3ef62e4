"""Best tree from one distribution per position and a transition between neighbours. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from coppice.core.tree import TokenTree
from coppice.search.likeliest_tokens import FloatArray, top_children
from coppice.search.transition_scores import TransitionScores
from coppice.search.tree_builder import Frontier, build_tree
from coppice.search.tree_limits import Children, TreeLimits

CAN_COMPILE = True
try:
    from coppice.kernels.cpu.transition_search import Bounds, Tables, search, search_behind_token
except ImportError:
    CAN_COMPILE = False

_ONE = np.float32(1)


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
    if not CAN_COMPILE:
        return _library_tree(root, transition, scores, sigmas, limits, max_children, source)
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


def _library_tree(
    root: Children | int,
    transition: TransitionScores,
    scores: FloatArray,
    sigmas: FloatArray,
    limits: TreeLimits,
    max_children: int,
    source: str,
) -> TokenTree:
    """Reference for `transition_tree`, in numpy."""

    def children_of(token_ids: Sequence[int], depths: Sequence[int]) -> list[Children]:
        return top_children(transition.behind(token_ids, scores, depths, sigmas), _ONE, max_children)

    first_depth = 0 if isinstance(root, Children) else 1

    def expand(frontier: Frontier) -> list[Children]:
        return children_of(frontier.token_ids, [depth - 1 + first_depth for depth in frontier.depths])

    children = root if isinstance(root, Children) else children_of([root], [0])[0]
    depths = replace(limits, max_depth=len(scores) + 1 - first_depth)
    return build_tree(children, expand, depths, source)
