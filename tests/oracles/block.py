"""Block verification of a chain (Sun et al. 2403.10444): the most accepted tokens that any rule can give one chain.

Every prefix is tried, and the longest that passes counts: a token that chain rejection would have refused can be saved
by those behind it.
"""

from __future__ import annotations

from coppice.core.chance import Chance
from coppice.core.sampled_tree import SampledTree
from coppice.core.tree import ROOT
from tests.oracles.chain_rejection import check_chain
from verifier_svc.verify.acceptance import Acceptance
from verifier_svc.verify.traversal import FloatArray, Target, accept, ratio, remaining_rate, residual


def block_verification(chain: SampledTree, target: Target, chance: Chance) -> Acceptance:
    """Accept a prefix of a sampled chain.

    Raises:
        InvalidTreeError: the tree branches.
    """
    check_chain(chain)
    rate = 1.0
    accepted = ROOT
    _, law = _end_at(chain, target, ROOT, rate)
    for node, token in enumerate(chain.token_ids):
        [(_, draft)] = chain.draws(node - 1)
        rate = ratio(target(node - 1), draft, token, rate)
        passes, left = _end_at(chain, target, node, rate)
        if chance.happens(passes):
            accepted, law = node, left
    return accept(chain, accepted, law, chance)


def _end_at(chain: SampledTree, target: Target, node: int, rate: float) -> tuple[float, FloatArray]:
    """How likely a prefix of this rate is to pass when it is tried, and the law of the token that then follows it."""
    law = target(node)
    drafts = [draft for _, draft in chain.draws(node)]
    if not drafts:
        return rate, law
    mass, left = residual(law, drafts[0], rate)
    return remaining_rate(mass, rate), left
