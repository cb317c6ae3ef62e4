"""Sampled trees have the law that their own distributions say: exact enumeration, and seeded draws against it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from coppice.core.chance import Purpose, seeded_chance
from coppice.core.draft_distribution import DraftDistribution
from coppice.core.tree import ROOT
from drafter_svc.drafters.small_lm.tree_sampler import Path, sample_children, sample_tree
from tests.unit.verifier_svc.enumeration import Languages, every_outcome

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
