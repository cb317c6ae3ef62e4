"""Every rejection rule is lossless: exact enumeration of all drafts and acceptances, for many pairs of languages."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from coppice.core.draft_distribution import DraftDistribution
from coppice.core.errors import InvalidTreeError
from coppice.core.sampled_tree import SampledTree
from coppice.core.tree import ROOT
from tests.oracles.block import block_verification
from tests.oracles.chain_rejection import chain_rejection
from tests.oracles.multi_step import multi_step
from tests.unit.verifier_svc.enumeration import (
    DEGENERATE,
    Languages,
    Rule,
    every_outcome,
    find,
    law_of_blocks,
    sampler,
)
from verifier_svc.verify.acceptance import Acceptance
from verifier_svc.verify.traversal import FloatArray, residual, traversal

TOLERANCE = 1e-12
CHAIN_RULES = [chain_rejection, block_verification]
TREE_RULES = [multi_step, traversal]
ALL_RULES = pytest.mark.parametrize("rule", CHAIN_RULES + TREE_RULES, ids=lambda rule: rule.__name__)
BOTH_TREE_RULES = pytest.mark.parametrize("rule", TREE_RULES, ids=lambda rule: rule.__name__)
KINDS = pytest.mark.parametrize("kinds", [("ordinary",), DEGENERATE], ids=["ordinary", "degenerate"])
TREES = pytest.mark.parametrize(
    ("vocab", "widths", "num_pairs"),
    [(3, (2, 1), 12), (3, (1, 2), 24), (3, (2, 2), 3), (3, (3,), 24), (4, (2, 1), 4), (4, (3,), 12), (5, (3,), 6)],
    ids=lambda value: str(value).replace(" ", ""),
)


@ALL_RULES
@KINDS
@pytest.mark.parametrize(("vocab", "depth"), [(3, 1), (3, 2), (3, 3), (4, 2), (5, 2)])
def test_chains_keep_the_targets_law(rule: Rule, kinds: tuple[str, ...], vocab: int, depth: int) -> None:
    for seed in range(16):
        assert find(rule, sampler((1,) * depth), Languages(seed, vocab, kinds), depth).bias < TOLERANCE


@BOTH_TREE_RULES
@KINDS
@TREES
def test_trees_drawn_without_replacement_keep_the_targets_law(
    rule: Rule, kinds: tuple[str, ...], vocab: int, widths: tuple[int, ...], num_pairs: int
) -> None:
    for seed in range(num_pairs):
        assert find(rule, sampler(widths), Languages(seed, vocab, kinds), len(widths)).bias < TOLERANCE


@BOTH_TREE_RULES
@KINDS
@pytest.mark.parametrize(
    ("vocab", "widths", "num_pairs"), [(3, (2, 1), 8), (3, (3,), 12), (3, (2, 2), 2), (4, (2,), 12)]
)
def test_trees_drawn_with_replacement_keep_the_targets_law(
    rule: Rule, kinds: tuple[str, ...], vocab: int, widths: tuple[int, ...], num_pairs: int
) -> None:
    draw = sampler(widths, with_replacement=True)
    for seed in range(num_pairs):
        assert find(rule, draw, Languages(seed, vocab, kinds), len(widths)).bias < TOLERANCE


@ALL_RULES
@KINDS
@pytest.mark.parametrize("max_draft_tokens", [1, 2, 3])
def test_a_truncated_renormalised_draft_distribution_keeps_the_targets_law(
    rule: Rule, kinds: tuple[str, ...], max_draft_tokens: int
) -> None:
    """What crosses the wire: a few tokens with float32 weights."""
    widths = (2, 1) if rule in TREE_RULES else (1, 1)
    for seed in range(6):
        pair = Languages(seed, 4, kinds, max_draft_tokens=max_draft_tokens)
        assert find(rule, sampler(widths), pair, 2).bias < TOLERANCE


def ragged(pair: Languages) -> list[tuple[SampledTree, float]]:
    """Trees whose first child has two children and whose second has none."""
    grown = []
    for tree, weight in every_outcome(functools.partial(sampler((2, 2)), pair)):
        if len(tree.children[0]) < 2 or len(tree.children[1]) < 2:
            continue
        grown.append(
            (SampledTree(tree.token_ids[:4], (ROOT, ROOT, 0, 0), (*tree.distributions[:2], None, None, None)), weight)
        )
    return grown


@BOTH_TREE_RULES
def test_a_ragged_tree_keeps_the_targets_law(rule: Rule) -> None:
    for seed in range(3):
        pair = Languages(seed, 3)
        blocks = [
            (acceptance.token_ids, weight * share)
            for tree, weight in ragged(pair)
            for acceptance, share in every_outcome(functools.partial(rule, tree, pair.after(tree)))
        ]
        assert np.abs(law_of_blocks(blocks, pair, 3) - pair.joint((), 3)).sum() / 2 < TOLERANCE


@ALL_RULES
def test_without_a_draft_the_block_is_one_token_of_the_target(rule: Rule) -> None:
    finding = find(rule, sampler(()), Languages(0, 4), depth=0)
    assert finding.bias < TOLERANCE
    assert finding.accepted == 0


@ALL_RULES
def test_a_draft_by_the_target_itself_is_accepted_whole(rule: Rule) -> None:
    for seed in range(8):
        finding = find(rule, sampler((1, 1, 1)), Languages(seed, 3, ("equal", "equal with zeros")), depth=3)
        assert finding.accepted == pytest.approx(3, abs=TOLERANCE)


@ALL_RULES
def test_a_draft_that_the_target_rules_out_is_never_accepted(rule: Rule) -> None:
    for seed in range(8):
        assert find(rule, sampler((1, 1)), Languages(seed, 4, ("disjoint",)), depth=2).accepted == 0


def blocks_of(rule: Rule, tree: SampledTree, pair: Languages) -> dict[Acceptance, float]:
    blocks: dict[Acceptance, float] = {}
    for acceptance, weight in every_outcome(functools.partial(rule, tree, pair.after(tree))):
        blocks[acceptance] = blocks.get(acceptance, 0.0) + weight
    return {block: weight for block, weight in blocks.items() if weight > TOLERANCE}


@pytest.mark.parametrize(
    ("rule", "special_case"),
    [(multi_step, chain_rejection), (traversal, block_verification)],
    ids=lambda rule: rule.__name__,
)
@KINDS
def test_on_one_chain_a_rule_for_trees_is_its_rule_for_chains(
    rule: Rule, special_case: Rule, kinds: tuple[str, ...]
) -> None:
    """Not only the law of the output, but that of the block given the draft."""
    for seed in range(12):
        pair = Languages(seed, 3, kinds)
        for chain, _ in every_outcome(functools.partial(sampler((1, 1, 1)), pair)):
            assert blocks_of(rule, chain, pair) == pytest.approx(blocks_of(special_case, chain, pair), abs=TOLERANCE)


@BOTH_TREE_RULES
@KINDS
@pytest.mark.parametrize("with_replacement", [False, True])
def test_the_bonus_token_never_repeats_a_rejected_child(
    rule: Rule, kinds: tuple[str, ...], with_replacement: bool
) -> None:
    """So nothing that was rejected can hang behind the outcome and come back as the next round's draft."""
    draw = sampler((2, 1), with_replacement=with_replacement)
    for seed in range(6):
        pair = Languages(seed, 3, kinds)
        for tree, _ in every_outcome(functools.partial(draw, pair)):
            for block in blocks_of(rule, tree, pair):
                last = block.nodes[-1] if block.nodes else ROOT
                assert block.token_ids[-1] not in {tree.token_ids[child] for child in tree.children[last + 1]}


class NoCoinComesUp:
    """What only rounding can do: even coins of probability 1 fail."""

    def happens(self, probability: float) -> bool:
        return False

    def choice(self, probabilities: FloatArray) -> int:
        assert probabilities.sum() == pytest.approx(1)
        return int(probabilities.argmax())


@ALL_RULES
@KINDS
def test_a_branch_that_only_rounding_can_reach_still_ends_with_a_token(rule: Rule, kinds: tuple[str, ...]) -> None:
    widths = (2, 2) if rule in TREE_RULES else (1, 1)
    for seed in range(12):
        pair = Languages(seed, 3, (*kinds, "equal"))
        for tree, _ in every_outcome(functools.partial(sampler(widths), pair)):
            block = rule(tree, pair.after(tree), NoCoinComesUp())
            assert block.nodes == ()
            assert len(block.token_ids) == 1


def test_traversal_does_not_look_below_a_token_that_the_target_rules_out() -> None:
    looked: list[int] = []
    certain = DraftDistribution((1,), (1.0,))
    chain = SampledTree((1, 1), (ROOT, 0), (certain, certain, None))

    def target(node: int) -> FloatArray:
        looked.append(node)
        return np.array([1.0, 0.0])

    assert traversal(chain, target, NoCoinComesUp()).token_ids == (0,)
    assert looked == [ROOT]


@pytest.mark.parametrize("rule", CHAIN_RULES, ids=lambda rule: rule.__name__)
def test_a_rule_for_chains_refuses_a_tree_that_branches(rule: Rule) -> None:
    pair = Languages(0, 3)
    tree = SampledTree((0, 1), (ROOT, ROOT), (pair.draft(()), None, None))
    with pytest.raises(InvalidTreeError, match="branches"):
        blocks_of(rule, tree, pair)


def test_the_residual_is_what_the_draft_does_not_cover() -> None:
    law = np.array([0.5, 0.3, 0.2, 0.0])
    mass, left = residual(law, DraftDistribution((0, 3), (0.25, 0.75)))
    assert mass == pytest.approx(0.75)
    assert left == pytest.approx(np.array([1, 1.2, 0.8, 0]) / 3)
    assert law.tolist() == [0.5, 0.3, 0.2, 0.0]


def test_a_residual_of_nothing_is_the_law_itself() -> None:
    law: FloatArray = np.array([0.25, 0.75, 0.0])
    mass, left = residual(law, DraftDistribution((0, 1), (1.0, 3.0)))
    assert mass == 0
    assert left.tolist() == law.tolist()
