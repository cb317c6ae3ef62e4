"""Combinations that look right and are biased: the enumeration that proves the rules must find each of them out.

Most use the rules as they are, on trees that are not what they claim to be; the rest are rules with one line wrong.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from coppice.core.chance import Chance, Purpose, UniformChance, seeded_chance
from coppice.core.draft_distribution import DraftDistribution
from coppice.core.sampled_tree import SampledTree
from coppice.core.tree import ROOT
from drafter_svc.drafters.small_lm.sampled_lm import sample_children, sample_tree
from tests.oracles.block import block_verification
from tests.oracles.chain_rejection import chain_rejection
from tests.oracles.multi_step import multi_step
from tests.unit.verifier_svc.enumeration import Languages, Rule, every_outcome, find, sampler
from verifier_svc.verify.acceptance import Acceptance
from verifier_svc.verify.traversal import FloatArray, Target, accept, ratio, remaining_rate, residual, traversal

# A lossless rule is off by 1e-15; what is found here must stand out from that by thirteen orders of magnitude.
BIASED = 0.01
EXACT = 1e-12
TREE_RULES = pytest.mark.parametrize("rule", [multi_step, traversal], ids=lambda rule: rule.__name__)
Alter = Callable[[SampledTree], SampledTree]


def languages(vocab: int = 3, closeness: float = 0.3) -> list[Languages]:
    return [Languages(seed, vocab, closeness=closeness) for seed in range(4)]


def largest_bias(rule: Rule, widths: tuple[int, ...], alter: Alter, pairs: list[Languages], **options: bool) -> float:
    return max(find(rule, sampler(widths, **options), pair, len(widths), alter).bias for pair in pairs)


def keep(tree: SampledTree, nodes: Sequence[int]) -> SampledTree:
    """The tree of some of its nodes, each with the distribution it came with."""
    new = {ROOT: ROOT, **{old: index for index, old in enumerate(nodes)}}
    return SampledTree(
        token_ids=tuple(tree.token_ids[old] for old in nodes),
        parents=tuple(new[tree.parents[old]] for old in nodes),
        distributions=tuple(tree.distributions[old + 1] for old in (ROOT, *nodes)),
        with_replacement=tree.with_replacement,
    )


def path_probability(tree: SampledTree, node: int) -> float:
    """A node's probability under the drafter, the product along its path."""
    value = 1.0
    for step in tree.path(node):
        distribution = tree.distributions[tree.parents[step] + 1]
        assert distribution is not None
        value *= distribution.probability(tree.token_ids[step])
    return value


def likeliest_nodes(tree: SampledTree) -> SampledTree:
    """What a planner would do to a fixed tree: keep the likeliest half."""
    ranked = sorted(range(len(tree)), key=lambda node: (-path_probability(tree, node), node))
    return keep(tree, sorted(ranked[: len(tree) // 2]))


def best_first(tree: SampledTree) -> SampledTree:
    """Siblings by probability instead of in the order of their drawing."""
    return keep(tree, sorted(range(len(tree)), key=lambda node: (tree.parents[node], -path_probability(tree, node))))


def first_drawn(tree: SampledTree) -> SampledTree:
    """Every node's first child alone: a shape that was fixed before anything was drawn."""
    kept: list[int] = []
    for node in range(len(tree)):
        parent = tree.parents[node]
        if node == tree.children[parent + 1][0] and (parent == ROOT or parent in kept):
            kept.append(node)
    return keep(tree, kept)


@TREE_RULES
def test_pruning_a_sampled_tree_by_its_probabilities_is_biased(rule: Rule) -> None:
    assert largest_bias(rule, (2, 1), likeliest_nodes, languages()) > BIASED


@TREE_RULES
def test_cutting_a_sampled_tree_by_a_rule_that_was_fixed_before_is_not(rule: Rule) -> None:
    assert largest_bias(rule, (2, 2), first_drawn, languages()) < EXACT


@TREE_RULES
def test_re_ranking_siblings_is_biased(rule: Rule) -> None:
    assert largest_bias(rule, (2,), best_first, languages()) > BIASED


@TREE_RULES
def test_children_drawn_without_replacement_and_treated_as_with_are_biased(rule: Rule) -> None:
    alter: Alter = lambda tree: replace(tree, with_replacement=True)  # noqa: E731
    assert largest_bias(rule, (3,), alter, languages(vocab=5, closeness=0)) > BIASED


@TREE_RULES
def test_trying_a_child_that_was_drawn_twice_only_once_is_biased(rule: Rule) -> None:
    def merge_duplicates(tree: SampledTree) -> SampledTree:
        first = {token: node for node, token in reversed(list(enumerate(tree.token_ids)))}
        return keep(tree, sorted(first.values()))

    assert largest_bias(rule, (3,), merge_duplicates, languages(closeness=0), with_replacement=True) > BIASED


@TREE_RULES
def test_likeliest_children_in_place_of_sampled_ones_are_biased(rule: Rule) -> None:
    def draw(pair: Languages, chance: Chance) -> SampledTree:
        distribution = pair.draft(())
        likeliest = np.argsort(-distribution.probabilities)[:2]
        return SampledTree(tuple(distribution.tokens[likeliest].tolist()), (ROOT, ROOT), (distribution, None, None))

    assert max(find(rule, draw, pair, depth=1).bias for pair in languages()) > 0.1


class Unnormalised(DraftDistribution):
    """A truncated distribution whose probabilities are those of before the truncation."""

    @property
    def probabilities(self) -> FloatArray:  # type: ignore[override]
        return np.array(self.weights)


def draw_from_the_likeliest(
    pair: Languages, chance: Chance, claim: Callable[[Languages], DraftDistribution]
) -> SampledTree:
    """One child, drawn from the renormalised two likeliest tokens, with the distribution that `claim` gives it."""
    truncated = Languages(pair.seed, pair.vocab, closeness=pair.closeness, max_draft_tokens=2).draft(())
    [token] = sample_children(truncated, 1, chance, with_replacement=False)
    return SampledTree((token,), (ROOT,), (claim(pair), None))


def claim_whole(pair: Languages) -> DraftDistribution:
    return pair.draft(())


def claim_unnormalised(pair: Languages) -> DraftDistribution:
    whole = pair.draft(())
    top = np.argsort(-whole.probabilities)[:2]
    return Unnormalised(tuple(whole.tokens[top].tolist()), tuple(whole.probabilities[top].tolist()))


@pytest.mark.parametrize("claim", [claim_whole, claim_unnormalised], ids=["whole", "not renormalised"])
@pytest.mark.parametrize("rule", [chain_rejection, block_verification, multi_step, traversal], ids=lambda r: r.__name__)
def test_a_distribution_that_is_not_the_one_drawn_from_is_biased(
    rule: Rule, claim: Callable[[Languages], DraftDistribution]
) -> None:
    def draw(pair: Languages, chance: Chance) -> SampledTree:
        return draw_from_the_likeliest(pair, chance, claim)

    assert max(find(rule, draw, pair, depth=1).bias for pair in languages(vocab=4)) > BIASED


def test_the_best_of_several_sampled_chains_is_biased() -> None:
    """Self-selection by the target's own score, then ratios as if the winner had been drawn alone."""

    def draw(pair: Languages, chance: Chance) -> SampledTree:
        drafts = [sample_tree((1, 1), pair.predict, chance) for _ in range(2)]
        return max(drafts, key=lambda tree: score(pair, tree.token_ids))

    def score(pair: Languages, tokens: tuple[int, ...]) -> float:
        first = float(pair.target(())[tokens[0]])
        return first + first * float(pair.target(tokens[:1])[tokens[1]])

    assert max(find(block_verification, draw, pair, depth=2).bias for pair in languages()) > BIASED


def test_drafts_of_two_drafters_under_one_of_their_distributions_are_biased() -> None:
    def draw(pair: Languages, chance: Chance) -> SampledTree:
        other = replace(pair, seed=pair.seed + 100)
        tokens = [*sample_children(pair.draft(()), 1, chance, with_replacement=True)]
        tokens += sample_children(other.draft(()), 1, chance, with_replacement=True)
        return SampledTree(tuple(tokens), (ROOT, ROOT), (pair.draft(()), None, None), with_replacement=True)

    assert max(find(multi_step, draw, pair, depth=1).bias for pair in languages()) > BIASED


def test_a_correction_from_the_target_instead_of_the_residual_is_biased() -> None:
    def rule(chain: SampledTree, target: Target, chance: Chance) -> Acceptance:
        for node, token in enumerate(chain.token_ids):
            [(_, draft)] = chain.draws(node - 1)
            if not chance.happens(ratio(target(node - 1), draft, token)):
                return accept(chain, node - 1, target(node - 1), chance)
        return accept(chain, len(chain) - 1, target(len(chain) - 1), chance)

    assert max(find(rule, sampler((1, 1)), pair, depth=2).bias for pair in languages()) > BIASED


def test_top_p_on_the_target_but_not_on_the_residual_is_biased() -> None:
    """The law to keep is the truncated target's; the correction comes from the residual of the whole one."""

    class Truncated(Languages):
        def target(self, path: tuple[int, ...]) -> FloatArray:
            row = super().target(path).copy()
            row[row.argmin()] = 0
            return row / row.sum()

    def rule(chain: SampledTree, target: Target, chance: Chance) -> Acceptance:
        [(_, draft)] = chain.draws(ROOT)
        if chance.happens(ratio(target(ROOT), draft, chain.token_ids[0])):
            return accept(chain, 0, target(0), chance)
        whole = Languages(pair.seed, pair.vocab, closeness=pair.closeness).target(())
        return accept(chain, ROOT, residual(whole.copy(), draft)[1], chance)

    biases = []
    for seed in range(4):
        pair = Truncated(seed, 4, closeness=0.3)
        biases.append(find(rule, sampler((1,)), pair, depth=1).bias)
        assert find(chain_rejection, sampler((1,)), pair, depth=1).bias < EXACT
    assert max(biases) > BIASED


def test_block_verification_that_stops_at_the_first_prefix_that_fails_is_biased() -> None:
    def rule(chain: SampledTree, target: Target, chance: Chance) -> Acceptance:
        accepted, rate = ROOT, 1.0
        law = residual(target(ROOT), next(chain.draws(ROOT))[1])[1]
        for node, token in enumerate(chain.token_ids):
            [(_, draft)] = chain.draws(node - 1)
            rate = ratio(target(node - 1), draft, token, rate)
            left, passes = target(node), rate
            for _, behind in chain.draws(node):
                mass, left = residual(target(node), behind, rate)
                passes = remaining_rate(mass, rate)
            if not chance.happens(passes):
                break
            accepted, law = node, left
        return accept(chain, accepted, law, chance)

    assert max(find(rule, sampler((1, 1)), pair, depth=2).bias for pair in languages()) > BIASED


def test_the_longest_path_under_independent_coins_is_biased() -> None:
    """A coin of min(1, p / q) for every node, then the deepest node all of whose path came up."""

    def rule(tree: SampledTree, target: Target, chance: Chance) -> Acceptance:
        passed = [
            chance.happens(ratio(target(node), draft, tree.token_ids[child]))
            for node in range(ROOT, len(tree))
            for child, draft in tree.draws(node)
        ]
        open_nodes = [node for node in range(len(tree)) if all(passed[step] for step in tree.path(node))]
        deepest = max(open_nodes, key=lambda node: len(tree.path(node)), default=ROOT)
        return accept(tree, deepest, target(deepest), chance)

    assert max(find(rule, sampler((2, 1)), pair, depth=2).bias for pair in languages()) > BIASED


def test_a_threshold_on_the_targets_probability_is_biased() -> None:
    """Typical acceptance (Medusa): good text, of another law."""

    def rule(chain: SampledTree, target: Target, chance: Chance) -> Acceptance:
        law = target(ROOT)
        entropy = -sum(share * np.log(share) for share in law.tolist() if share > 0)
        passes = law[chain.token_ids[0]] > min(0.09, 0.3 * np.exp(-entropy))
        node = 0 if passes else ROOT
        return accept(chain, node, target(node), chance)

    assert max(find(rule, sampler((1,)), pair, depth=1).bias for pair in languages()) > BIASED


class SameNumber:
    """The draft's own uniform number again for the coin; what follows is taken from another source."""

    def __init__(self, number: float, source: Chance) -> None:
        self._coin = UniformChance(iter([number]))
        self._source = source

    def happens(self, probability: float) -> bool:
        return self._coin.happens(probability)

    def choice(self, probabilities: FloatArray) -> int:
        return self._source.choice(probabilities)


def law_of_first_token(target: FloatArray, draft: DraftDistribution, *, reuse: bool) -> FloatArray:
    """Of a one-token chain, over all uniform numbers: between two breakpoints every number decides alike."""
    ratios = target[draft.tokens] / draft.probabilities
    points = sorted({0.0, 1.0, *np.minimum(1.0, [*np.cumsum(draft.probabilities), *ratios]).tolist()})
    law = np.zeros(len(target))
    for low, high in itertools.pairwise(points):
        number = (low + high) / 2
        tokens = sample_children(draft, 1, UniformChance(iter([number])), with_replacement=False)
        verify = functools.partial(first_token, SampledTree(tokens, (ROOT,), (draft, None)), target, number, reuse)
        for token, weight in every_outcome(verify):
            law[token] += (high - low) * weight
    return law


def first_token(chain: SampledTree, target: FloatArray, number: float, reuse: bool, source: Chance) -> int:
    chance = SameNumber(number, source) if reuse else source
    return chain_rejection(chain, lambda node: target.copy(), chance).token_ids[0]


@pytest.mark.parametrize("reuse", [True, False], ids=["reused", "independent"])
def test_a_coin_that_reuses_the_drafts_uniform_number_is_biased(reuse: bool) -> None:
    biases = []
    for pair in languages():
        law = law_of_first_token(pair.target(()), pair.draft(()), reuse=reuse)
        biases.append(float(np.abs(law - pair.target(())).sum()) / 2)
    assert max(biases) > BIASED if reuse else max(biases) < EXACT


@pytest.mark.parametrize("purpose", list(Purpose))
def test_draft_and_acceptance_need_streams_of_their_own(purpose: Purpose) -> None:
    """Seeded streams, 3,000 rounds: of one purpose for both they are off by far, of two they are off by chance."""
    rounds = 3000
    pair = Languages(1, 4, closeness=0.0)
    counts = np.zeros(4)
    for position in range(rounds):
        tree = sample_tree((2,), pair.predict, seeded_chance(7, position, Purpose.DRAFT))
        block = traversal(tree, pair.after(tree), seeded_chance(7, position, purpose))
        counts[block.token_ids[0]] += 1
    expected = rounds * pair.target(())
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    # The 0.999 quantile of chi-square with 3 degrees of freedom.
    assert chi_square < 16.27 if purpose == Purpose.ACCEPTANCE else chi_square > 50
