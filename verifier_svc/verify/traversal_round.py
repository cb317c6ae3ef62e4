"""A round of traversal verification: the rule on a pass's logits, cut where the output ends."""

from __future__ import annotations

from collections.abc import Callable

from coppice.core.chance import Chance
from coppice.core.sampled_tree import SampledTree
from coppice.core.tree import ROOT, TokenTree
from verifier_svc.verify.acceptance import Acceptance
from verifier_svc.verify.rules.residual import FloatArray
from verifier_svc.verify.rules.traversal import traversal
from verifier_svc.verify.token_choice import Logits, TokenChooser


def traverse(
    tree: TokenTree, logits: Logits, chooser: TokenChooser, chance: Chance, is_last: Callable[[int], bool]
) -> Acceptance:
    """Accept a path of a sampled tree; the committed tokens become part of the chooser's history.

    Args:
        tree: the draft, with its distributions.
        logits: the root's and the tree's rows [1 + nodes, vocab].
        chooser: gives the target's law behind each node, with all sampling parameters applied to its own history.
        chance: independent of what the tree was drawn with.
        is_last: called with every token in order; true when the output ends with it.
    """
    sampled = SampledTree.of(tree)

    def law(node: int) -> FloatArray:
        return chooser.law(logits[node - ROOT], [tree.token_ids[step] for step in sampled.path(node)])

    block = traversal(sampled, law, chance)
    for count, token in enumerate(block.token_ids, start=1):
        chooser.push(token)
        if is_last(token):
            return Acceptance(block.token_ids[:count], block.nodes[:count])
    return block
