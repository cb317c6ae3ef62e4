"""Traversal verification of a sampled tree (Weng et al. 2505.12398): sequences are tried from the leaves up.

A node's rate is the probability that the sequence ending there, or one that goes on from it, is accepted; it is spent
on the children in the order of their drawing, and what they leave is the node's own. So the children of a token that a
top-down rule would refuse are not wasted. On a chain it accepts as block verification does.
"""

from __future__ import annotations

from coppice.core.chance import Chance
from coppice.core.sampled_tree import SampledTree
from coppice.core.tree import ROOT
from verifier_svc.verify.acceptance import Acceptance
from verifier_svc.verify.rules.residual import Target, accept, ratio, remaining_rate, residual


def traversal(tree: SampledTree, target: Target, chance: Chance) -> Acceptance:
    """Accept a path of a sampled tree, from the leaves up."""
    acceptance = _visit(tree, target, chance, ROOT, 1.0)
    assert acceptance is not None, "the root always accepts"
    return acceptance


def _visit(tree: SampledTree, target: Target, chance: Chance, node: int, rate: float) -> Acceptance | None:
    """What is accepted at or below a node of this rate, if anything."""
    if rate == 0:
        return None
    law = target(node)
    for child, draft in tree.draws(node):
        found = _visit(tree, target, chance, child, ratio(law, draft, tree.token_ids[child], rate))
        if found is not None:
            return found
        mass, law = residual(law, draft, rate)
        rate = remaining_rate(mass, rate)
    # The root's rate stays 1, save where rounding alone leads. It is the committed text and needs no coin.
    return accept(tree, node, law, chance) if node == ROOT or chance.happens(rate) else None
