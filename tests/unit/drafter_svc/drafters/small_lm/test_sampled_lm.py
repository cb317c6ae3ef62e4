"""Sampled trees of the small LM: what they say they were drawn from is what they were drawn from."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from coppice.core.sampled_tree import SampledTree
from coppice.core.sampling import SamplingParams
from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree
from drafter_svc.drafters.base import SamplingDrafter
from drafter_svc.drafters.small_lm.drafter import SmallLm
from drafter_svc.drafters.small_lm.sampled_lm import MAX_TOKENS
from tests.unit.drafter_svc.drafters.small_lm.test_small_lm import CONTEXT, PROMPT, VOCAB, make_drafter

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
