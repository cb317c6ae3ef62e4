"""Sampled trees of the small LM: what they say they were drawn from is what they were drawn from."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from coppice.core.chance import Purpose, seeded_chance
from coppice.core.draft_distribution import DraftDistribution
from coppice.core.sampled_tree import SampledTree
from coppice.core.sampling import SamplingParams
from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree
from drafter_svc.drafters.base import SamplingDrafter
from drafter_svc.drafters.small_lm.drafter import SmallLm
from drafter_svc.drafters.small_lm.sampled_lm import (
    MAX_LEVELS,
    MAX_NODES,
    MAX_TOKENS,
    MAX_WIDTH,
    Path,
    sample_children,
    sample_tree,
    tree_widths,
)
from tests.unit.drafter_svc.drafters.small_lm.test_small_lm import CONTEXT, PROMPT, VOCAB, make_drafter
from tests.unit.verifier_svc.enumeration import Languages, every_outcome

SAMPLING = {
    "T=1": SamplingParams(temperature=1.0, seed=7),
    "T=0.5": SamplingParams(temperature=0.5, seed=8),
    "top-k": SamplingParams(temperature=1.0, top_k=5, seed=9),
    "bias": SamplingParams(temperature=1.0, logit_bias={3: 4.0}, bad_token_ids=(5,), seed=10),
    "penalty": SamplingParams(temperature=1.0, repetition_penalty=2.0, seed=11),
}


def small(model: LlamaForCausalLM, route: str = "cached") -> SmallLm:
    return make_drafter(model, route, max_steps=3)


@torch.inference_mode()
def plain_row(model: LlamaForCausalLM, tokens: list[int], sampling: SamplingParams) -> np.ndarray:
    """The oracle: probabilities [vocab] by one plain forward, with the request's parameters."""
    row = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].double().numpy()
    seen = list(set(tokens))
    row[seen] = np.where(
        row[seen] > 0, row[seen] / sampling.repetition_penalty, row[seen] * sampling.repetition_penalty
    )
    for token, bias in sampling.logit_bias.items():
        row[token] += bias
    row[list(sampling.bad_token_ids)] = -np.inf
    if sampling.top_k:
        row[np.argsort(-row)[sampling.top_k :]] = -np.inf
    weights = np.exp((row - row.max()) / sampling.temperature)
    return weights / weights.sum()


def assert_drawn_from_the_model(
    model: LlamaForCausalLM, tree: TokenTree, committed: list[int], sampling: SamplingParams
) -> None:
    sampled = SampledTree.of(tree)
    for node in range(ROOT, len(tree)):
        distribution = sampled.distributions[node + 1]
        if distribution is None:
            continue
        path = [tree.token_ids[step] for step in sampled.path(node)]
        row = plain_row(model, [*committed, *path], sampling)
        kept = row[list(distribution.token_ids)]
        assert len(distribution) <= MAX_TOKENS
        assert kept.min() >= np.sort(row)[-len(distribution)] - 1e-4
        assert distribution.probabilities == pytest.approx(kept / kept.sum(), abs=1e-4)


@pytest.mark.parametrize("route", ["lean", "cached", "plain"])
@pytest.mark.parametrize("name", SAMPLING)
def test_distributions_are_the_models_own_through_many_rounds(llama: LlamaForCausalLM, route: str, name: str) -> None:
    sampling = SAMPLING[name]
    rng = np.random.default_rng(3)
    sequence, committed = small(llama, route).open_sampled(PROMPT, sampling), list(PROMPT)
    for _ in range(4):
        tree = sequence.draft(12)
        assert_drawn_from_the_model(llama, tree, committed, sampling)
        assert not sequence.prepare()
        accepted = tree.path(int(rng.integers(-1, len(tree))))
        outcome = [*(tree.token_ids[node] for node in accepted), int(rng.integers(0, VOCAB))]
        sequence.extend(outcome)
        committed += outcome


def test_a_tree_is_a_function_of_seed_and_committed_tokens(llama: LlamaForCausalLM) -> None:
    drafter = small(llama)
    sequence = drafter.open_sampled(PROMPT, SAMPLING["T=1"])
    first = sequence.draft(12)
    assert sequence.draft(12) == first
    sequence.extend([*first.token_ids[:1], 9])
    fresh = drafter.open_sampled([*PROMPT, first.token_ids[0], 9], SAMPLING["T=1"])
    again, expected = sequence.draft(12), fresh.draft(12)
    assert (again.token_ids, again.parents) == (expected.token_ids, expected.parents)
    seeds = {
        drafter.open_sampled(PROMPT, SamplingParams(temperature=1.0, seed=seed)).draft(12).token_ids
        for seed in range(20)
    }
    assert len(seeds) > 5


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.01}, {"temperature": 1.0, "top_k": 1}])
def test_the_size_does_not_depend_on_what_is_drawn(llama: LlamaForCausalLM, sampling: dict[str, float]) -> None:
    drafter = small(llama)
    sizes: Counter[tuple[int, ...]] = Counter()
    for seed in range(12):
        tree = drafter.open_sampled(PROMPT, SamplingParams(seed=seed, **sampling)).draft(12)
        sizes[tree.parents] += 1
        assert 0 < len(tree) <= 12
    assert len(sizes) == 1
    assert tree.depth > 1


def test_a_request_that_forbids_every_token_gets_some_tree(llama: LlamaForCausalLM) -> None:
    sampling = SamplingParams(temperature=1.0, allowed_token_ids=(5,), bad_token_ids=(5,))
    assert len(small(llama).open_sampled(PROMPT, sampling).draft(12)) > 0


def test_children_are_drawn_as_often_as_their_distribution_says(llama: LlamaForCausalLM) -> None:
    drafter, rounds = small(llama), 600
    first: Counter[int] = Counter()
    for seed in range(rounds):
        tree = drafter.open_sampled(PROMPT, SamplingParams(temperature=1.0, seed=seed)).draft(1)
        first[tree.token_ids[0]] += 1
    distribution = tree.distributions[0]
    assert distribution is not None
    expected = rounds * distribution.probabilities
    counts = np.array([first[token] for token in distribution.token_ids])
    # The 0.999 quantile of chi-square with 15 degrees of freedom, as many as there are tokens but one.
    assert counts.sum() == rounds
    assert ((counts - expected) ** 2 / expected).sum() < 37.7


def test_trees_end_with_the_context_and_the_budget(llama: LlamaForCausalLM) -> None:
    drafter = small(llama)
    for length, depth in ((CONTEXT - 1, 2), (CONTEXT, 1), (CONTEXT + 1, 0)):
        sequence = drafter.open_sampled([1] * (CONTEXT - 4), SAMPLING["T=1"])
        sequence.extend([2] * (length - CONTEXT + 4))
        assert sequence.draft(12).depth == depth
    sequence = drafter.open_sampled(PROMPT, SAMPLING["T=1"])
    assert sequence.draft(0) == EMPTY_TREE
    assert [len(sequence.draft(budget)) <= budget for budget in (1, 3, 12, 100)] == [True] * 4
    assert len(sequence.draft(100)) <= 12


def test_the_small_lm_is_a_drafter_that_samples(llama: LlamaForCausalLM) -> None:
    assert isinstance(small(llama), SamplingDrafter)


DRAFT = DraftDistribution((2, 5, 7, 9), (1.0, 2.0, 4.0, 1.0))
SHARE = {token: weight / 8 for token, weight in zip(DRAFT.token_ids, DRAFT.weights, strict=True)}


def law_of_children(count: int, *, with_replacement: bool) -> dict[tuple[int, ...], float]:
    """From the definition: each draw's share among the tokens that are still there."""
    law = {}
    for tokens in itertools.product(DRAFT.token_ids, repeat=count):
        if not with_replacement and len(set(tokens)) < count:
            continue
        probability = 1.0
        for index, token in enumerate(tokens):
            gone = 0.0 if with_replacement else sum(SHARE[elder] for elder in tokens[:index])
            probability *= SHARE[token] / (1 - gone)
        law[tokens] = probability
    return law


@pytest.mark.parametrize("with_replacement", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_children_have_the_law_of_successive_draws(count: int, with_replacement: bool) -> None:
    law: Counter[tuple[int, ...]] = Counter()
    for tokens, weight in every_outcome(
        lambda chance: sample_children(DRAFT, count, chance, with_replacement=with_replacement)
    ):
        law[tokens] += weight
    assert law == pytest.approx(law_of_children(count, with_replacement=with_replacement), abs=1e-12)


def test_a_node_gets_no_more_children_than_its_distribution_has_tokens() -> None:
    chance = seeded_chance(0, 0, Purpose.DRAFT)
    assert sorted(sample_children(DRAFT, 6, chance, with_replacement=False)) == [2, 5, 7, 9]
    assert len(sample_children(DRAFT, 6, chance, with_replacement=True)) == 6


def test_a_level_is_predicted_in_one_call_and_every_node_carries_its_own_distribution() -> None:
    pair = Languages(0, 5)
    asked: list[list[Path]] = []

    def predict(paths: Sequence[Path]) -> list[DraftDistribution]:
        asked.append(list(paths))
        return pair.predict(paths)

    tree = sample_tree((3, 2, 1), predict, seeded_chance(1, 10, Purpose.DRAFT))
    assert [len(paths) for paths in asked] == [1, 3, 6]
    assert len(tree) == 3 + 6 + 6
    for node in range(ROOT, len(tree)):
        path = tuple(tree.token_ids[step] for step in tree.path(node))
        assert tree.distributions[node + 1] == (pair.draft(path) if len(path) < 3 else None)


def test_a_tree_is_a_function_of_seed_and_position() -> None:
    pair = Languages(0, 5)

    def draw(seed: int, position: int) -> tuple[int, ...]:
        return sample_tree((3, 2), pair.predict, seeded_chance(seed, position, Purpose.DRAFT)).token_ids

    assert draw(1, 10) == draw(1, 10)
    others = {draw(seed, position) for seed, position in itertools.product(range(4), range(4))}
    assert len(others) > 8


def test_seeded_trees_have_the_law_of_successive_draws() -> None:
    rounds = 4000
    drawn = Counter(
        sample_children(DRAFT, 2, seeded_chance(3, position, Purpose.DRAFT), with_replacement=False)
        for position in range(rounds)
    )
    law = law_of_children(2, with_replacement=False)
    assert set(drawn) == set(law)
    expected = rounds * np.array(list(law.values()))
    counts = np.array([drawn[tokens] for tokens in law])
    # The 0.999 quantile of chi-square with 11 degrees of freedom.
    assert ((counts - expected) ** 2 / expected).sum() < 31.3


RATES = {"measured": (0.745, 0.133, 0.046, 0.024), "flat": (0.3, 0.3, 0.2, 0.1), "one": (0.9,)}


def value(widths: Sequence[int], rates: Sequence[float], cost: float) -> float:
    total, nodes, reach = 0.0, 1, 1.0
    for width in widths:
        nodes, reach = nodes * width, reach * sum(rates[:width])
        total += reach - cost * nodes
    return total


def is_within(widths: Sequence[int], rates: Sequence[float], max_nodes: int, min_gain: float) -> bool:
    sizes = list(itertools.accumulate(widths, lambda nodes, width: nodes * width))
    reached = list(itertools.accumulate([sum(rates[:width]) for width in widths], lambda one, other: one * other))
    return sum(sizes) <= max_nodes and all(reach >= min_gain for reach in reached[:-1])


@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
@pytest.mark.parametrize("cost", [0.0, 0.02, 0.1])
@pytest.mark.parametrize(("max_nodes", "min_gain"), [(4, 0.0), (9, 0.3), (15, 0.1)])
def test_no_other_shape_promises_more(rates: tuple[float, ...], cost: float, max_nodes: int, min_gain: float) -> None:
    found = tree_widths(max_nodes, 4, rates, cost, min_gain)
    assert is_within(found, rates, max_nodes, min_gain)
    widths = range(1, len(rates) + 1)
    others = [shape for levels in range(5) for shape in itertools.product(widths, repeat=levels)]
    possible = [shape for shape in others if is_within(shape, rates, max_nodes, min_gain)]
    assert value(found, rates, cost) == pytest.approx(max(value(shape, rates, cost) for shape in possible))


def test_a_node_that_costs_more_than_it_brings_is_left_out() -> None:
    assert tree_widths(15, 8, (0.745, 0.133), 0.8, 0.0) == ()
    assert tree_widths(0, 8, (0.745, 0.133), 0.0, 0.0) == ()


def test_shapes_are_bounded_whatever_is_asked_for() -> None:
    widths = tree_widths(4096, 10**6, (0.4, 0.3, 0.2, 0.05, 0.04), 0.0, 0.0)
    assert len(widths) <= MAX_LEVELS
    assert max(widths) <= MAX_WIDTH
    assert sum(itertools.accumulate(widths, lambda nodes, width: nodes * width)) <= MAX_NODES
