"""Draft-ahead: trees after likely outcomes of the tree under verification (Saguaro, 2603.03251). Pure.

An outcome is a path of the expected tree, or none, and a token that the tree does not have after it. The search after
the committed tokens goes on beyond the tree that was sent; what it finds after an outcome is the draft for it.
"""

from __future__ import annotations

import math

from coppice.core.tree import TokenTree
from coppice.search.tree_limits import TreeLimits
from drafter_svc.drafters.base import AheadDraft

# Path probabilities are those of outcomes and continuations together, and steps are taken while the target computes.
AHEAD_LIMITS = TreeLimits(max_nodes=96, width=8, min_step_gain=0.02, min_path_log_prob=math.log(0.005))


def drafts_ahead(found: TokenTree, expected: TokenTree) -> tuple[AheadDraft, ...]:
    """Non-empty subtrees of `found` after outcomes of `expected`, likeliest outcome first.

    Both trees follow the committed tokens.
    """
    accepted = {(), *expected.paths()}
    drafts = [
        AheadDraft(path, log_prob, found.descend(path))
        for path, log_prob in zip(found.paths(), found.path_log_probs, strict=True)
        if path not in accepted and path[:-1] in accepted
    ]
    drafts.sort(key=lambda draft: -draft.log_prob)
    return tuple(draft for draft in drafts if len(draft.tree))
