"""Cases of other engines' test suites and of papers, as tables: drafts, what the target says, what is to come out.

Two of them fix the target to one token per context, where every lossless rule must accept the longest matching path.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from coppice.core.chance import Purpose, seeded_chance
from coppice.core.draft_distribution import DraftDistribution
from coppice.core.sampled_tree import SampledTree
from coppice.core.tree import ROOT
from tests.oracles.block import block_verification
from tests.oracles.chain_rejection import chain_rejection
from tests.oracles.multi_step import multi_step
from tests.unit.verifier_svc.enumeration import Rule
from verifier_svc.verify.traversal import FloatArray, ratio, remaining_rate, residual, traversal

VOCAB = 20
TREE_RULES = [multi_step, traversal]
ALL_RULES = [chain_rejection, block_verification, *TREE_RULES]

# The greedy cases of vLLM's rejection sampler: draft, the target's token at each place, committed tokens.
CHAINS = [
    ((1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4)),
    ((1, 2, 3), (1, 5, 3, 4), (1, 5)),
    ((1, 2), (1, 2, 5), (1, 2, 5)),
    ((3,), (3, 4), (3, 4)),
    ((1,), (1, 2), (1, 2)),
    ((), (5,), (5,)),
    ((1, 2, 3), (1, 2, 7, 6), (1, 2, 7)),
    ((4, 5, 6), (4, 8, 6, 9), (4, 8)),
    ((1, 2), (1, 2, 3), (1, 2, 3)),
    ((1,), (2, 3), (2,)),
    ((1, 2), (1, 5, 6), (1, 5)),
    ((3, 4), (3, 4, 7), (3, 4, 7)),
]

# SGLang's case for its tree kernel, two trees of a root and five drafted nodes, thresholds at 1 (smaller ones accept
# what the target would not say). Siblings in the order of its linked lists. Rows that are not named say 18.
# Tokens, parents, the target's token behind a node, committed tokens, accepted nodes.
TREES = [
    ((1, 2, 3, 4, 5), (ROOT, 0, ROOT, 2, 3), {ROOT: 3, 2: 4, 3: 5}, (3, 4, 5, 18), (2, 3, 4)),
    ((11, 12, 8, 9, 10), (ROOT, 0, ROOT, 2, 3), {ROOT: 11, 0: 12}, (11, 12, 18), (0, 1)),
]


def certain(token: int) -> FloatArray:
    row = np.zeros(VOCAB)
    row[token] = 1
    return row


def drawn(token_ids: tuple[int, ...], parents: tuple[int, ...]) -> SampledTree:
    """The tree as one of a drafter that gives each token the same probability."""
    uniform = DraftDistribution(tuple(range(VOCAB)), (1.0,) * VOCAB)
    return SampledTree(token_ids, parents, (uniform,) * (len(token_ids) + 1))


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize(("draft", "says", "committed"), CHAINS)
def test_a_chain_is_accepted_up_to_the_first_mismatch(
    rule: Rule, draft: tuple[int, ...], says: tuple[int, ...], committed: tuple[int, ...]
) -> None:
    chain = drawn(draft, tuple(range(ROOT, len(draft) - 1)))
    block = rule(chain, lambda node: certain(says[node + 1]), seeded_chance(0, 0, Purpose.ACCEPTANCE))
    assert block.token_ids == committed
    assert block.nodes == tuple(range(len(committed) - 1))


@pytest.mark.parametrize("rule", TREE_RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize(("token_ids", "parents", "says", "committed", "nodes"), TREES, ids=["first", "second"])
def test_the_path_that_the_target_takes_through_a_tree_is_accepted(
    rule: Rule,
    token_ids: tuple[int, ...],
    parents: tuple[int, ...],
    says: Mapping[int, int],
    committed: tuple[int, ...],
    nodes: tuple[int, ...],
) -> None:
    tree = drawn(token_ids, parents)
    for round_number in range(20):
        chance = seeded_chance(0, round_number, Purpose.ACCEPTANCE)
        block = rule(tree, lambda node: certain(says.get(node, 18)), chance)
        assert block.token_ids == committed
        assert block.nodes == nodes


def test_the_rates_of_the_traversal_papers_example() -> None:
    """Weng et al. 2505.12398: rows p = (.3, .4, .3) and q = (.6, .3, .1) everywhere; a is drafted, and b below it."""
    law = np.array([0.3, 0.4, 0.3])
    draft = DraftDistribution((0, 1, 2), (0.6, 0.3, 0.1))
    rate_a = ratio(law, draft, 0)
    assert rate_a == pytest.approx(0.5)
    assert ratio(law, draft, 1, rate_a) == pytest.approx(2 / 3)
    mass, left = residual(law, draft, rate_a)
    assert mass == pytest.approx(0.05)
    assert left == pytest.approx(np.array([0, 0, 1]))
    assert remaining_rate(mass, rate_a) == pytest.approx(1 / 11)
