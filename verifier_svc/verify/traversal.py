"""Traversal verification of a sampled tree (Weng et al. 2505.12398): sequences are tried from the leaves up.

A node's rate is the probability that the sequence ending there, or a continuation, is accepted; it is spent on the
children in the order in which they were drawn, and the rest is the node's own. Children of a token that a top-down rule
would reject are thus not wasted. On a chain it equals block verification.

It is a rejection rule of the shape `rule(tree, target, chance) -> Acceptance`: a tree whose nodes are draws from its
distributions, the target's next-token probabilities [vocab, float64] after a node (ROOT or a node's index) with all
sampling parameters applied, and a random source independent of the tree's. Given the committed tokens before it, the
block has the target's own distribution, but not its tokens for a seed. The rule trusts the drafter: distributions that
the tree was not drawn from bias the output. Sample-and-follow needs no distributions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from coppice.core.chance import Chance
from coppice.core.draft_distribution import DraftDistribution
from coppice.core.sampled_tree import SampledTree
from coppice.core.tree import ROOT, TokenTree
from verifier_svc.verify.acceptance import Acceptance
from verifier_svc.verify.sampler import Logits
from verifier_svc.verify.token_choice import TokenChooser

FloatArray = npt.NDArray[np.float64]
# The target's next-token probabilities [vocab] after a node, or after ROOT.
Target = Callable[[int], FloatArray]


def traverse(
    tree: TokenTree, logits: Logits, chooser: TokenChooser, chance: Chance, is_last: Callable[[int], bool]
) -> Acceptance:
    """Accept a path of a sampled tree, cut at the output's end; its tokens enter the chooser's history.

    Args:
        tree: the draft, with its distributions.
        logits: the root's and the tree's rows [1 + nodes, vocab].
        chooser: the target's distribution after each node, with all sampling parameters applied to its own history.
        chance: independent of the tree's random source.
        is_last: called with every token in order; true if the output ends with it.
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


def traversal(tree: SampledTree, target: Target, chance: Chance) -> Acceptance:
    """Accept a path of a sampled tree, from the leaves up."""
    acceptance = _visit(tree, target, chance, ROOT, 1.0)
    assert acceptance is not None, "the root always accepts"
    return acceptance


def residual(law: FloatArray, draft: DraftDistribution, rate: float = 1.0) -> tuple[float, FloatArray]:
    """Mass and normalisation of (rate * law - draft)+: the target's distribution after a rejected draft.

    Without any mass, the draft could not have been rejected, except by rounding; the distribution then stays unchanged.
    """
    left = rate * law
    left[draft.tokens] = np.maximum(left[draft.tokens] - draft.probabilities, 0.0)
    mass = float(left.sum())
    return (mass, left / mass) if mass > 0 else (0.0, law)


def ratio(law: FloatArray, draft: DraftDistribution, token: int, rate: float = 1.0) -> float:
    """min(1, rate * law / draft) at a token of the draft."""
    return min(1.0, rate * float(law[token]) / draft.probability(token))


def remaining_rate(mass: float, rate: float) -> float:
    """Acceptance rate of a sequence of `rate` after its next draft was rejected with this residual mass."""
    return mass / (mass + (1.0 - rate)) if mass > 0 else 0.0


def accept(tree: SampledTree, node: int, law: FloatArray, chance: Chance) -> Acceptance:
    """The path down to `node` and one more token, drawn from `law`."""
    nodes = tree.path(node)
    return Acceptance((*(tree.token_ids[step] for step in nodes), chance.choice(law)), nodes)


def _visit(tree: SampledTree, target: Target, chance: Chance, node: int, rate: float) -> Acceptance | None:
    """Accepted path at or below a node of this rate, if any."""
    if rate == 0:
        return None
    law = target(node)
    for child, draft in tree.draws(node):
        found = _visit(tree, target, chance, child, ratio(law, draft, tree.token_ids[child], rate))
        if found is not None:
            return found
        mass, law = residual(law, draft, rate)
        rate = remaining_rate(mass, rate)
    # The root's rate stays 1 except for rounding. It is committed text and needs no coin.
    return accept(tree, node, law, chance) if node == ROOT or chance.happens(rate) else None
