"""Chain rejection sampling (Leviathan et al. 2211.17192, Chen et al. 2302.01318).

The reference that the others are compared with: each draft token is accepted with probability min(1, p / q), and the
first rejection ends the block with a token of the residual.
"""

from __future__ import annotations

from coppice.core.chance import Chance
from coppice.core.errors import InvalidTreeError
from coppice.core.sampled_tree import SampledTree
from coppice.core.tree import ROOT
from verifier_svc.verify.acceptance import Acceptance
from verifier_svc.verify.traversal import Target, accept, ratio, residual


def chain_rejection(chain: SampledTree, target: Target, chance: Chance) -> Acceptance:
    """Accept a prefix of a sampled chain.

    Raises:
        InvalidTreeError: the tree branches.
    """
    check_chain(chain)
    for node, token in enumerate(chain.token_ids):
        law = target(node - 1)
        [(_, draft)] = chain.draws(node - 1)
        if not chance.happens(ratio(law, draft, token)):
            _, left = residual(law, draft)
            return accept(chain, node - 1, left, chance)
    last = len(chain) - 1 if len(chain) else ROOT
    return accept(chain, last, target(last), chance)


def check_chain(tree: SampledTree) -> None:
    """
    Raises:
        InvalidTreeError: the tree branches.
    """
    if any(len(children) > 1 for children in tree.children):
        raise InvalidTreeError("this acceptance rule is for chains, and the tree branches")
