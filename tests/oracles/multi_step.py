"""Multi-step speculative sampling over a tree (SpecInfer, Miao et al. 2305.09781, algorithm 2).

At a node the children are tried in the order of their drawing, each against what the rejected ones before it left of
the target's law. Where children were drawn without replacement, a child is tried against the distribution that it was
itself drawn from, and the rule is recursive rejection sampling (Sequoia, Chen et al. 2402.12374).
"""

from __future__ import annotations

from coppice.core.chance import Chance
from coppice.core.sampled_tree import SampledTree
from coppice.core.tree import ROOT
from verifier_svc.verify.acceptance import Acceptance
from verifier_svc.verify.traversal import FloatArray, Target, accept, ratio, residual


def multi_step(tree: SampledTree, target: Target, chance: Chance) -> Acceptance:
    """Accept a path of a sampled tree, from the root down."""
    node = ROOT
    while True:
        child, law = _accepted_child(tree, node, target(node), chance)
        if child is None:
            return accept(tree, node, law, chance)
        node = child


def _accepted_child(tree: SampledTree, node: int, law: FloatArray, chance: Chance) -> tuple[int | None, FloatArray]:
    """The first child that is accepted, if any, and what the rejected ones left of the node's law."""
    for child, draft in tree.draws(node):
        if chance.happens(ratio(law, draft, tree.token_ids[child])):
            return child, law
        _, law = residual(law, draft)
    return None, law
