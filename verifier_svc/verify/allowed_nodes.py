"""What of a draft an output's form allows."""

from __future__ import annotations

from coppice.core.tree import ROOT, TokenTree
from verifier_svc.verify.token_choice import Constraint


def allowed_nodes(tree: TokenTree, constraint: Constraint | None) -> TokenTree:
    """What of a tree hangs behind tokens that may follow the root: drafters do not know the output's form."""
    if constraint is None:
        return tree
    kept: list[bool] = []
    for parent, token in zip(tree.parents, tree.token_ids, strict=True):
        kept.append(bool(constraint.allowed[token]) if parent == ROOT else kept[parent])
    return tree.select(node for node, is_kept in enumerate(kept) if is_kept)
