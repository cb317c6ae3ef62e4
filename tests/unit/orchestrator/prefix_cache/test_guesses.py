"""Guesses: their probabilities are rates that were counted, and only what is likely enough is proposed."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree, chain
from coppice.search.counted_rates import MOST_CERTAIN
from orchestrator.prefix_cache.estimates import DraftersWord, HitRatePrior, HitRates, kind_of
from orchestrator.prefix_cache.guesses import SOURCE, Guesses, TokenCandidate

LONG = 16
KINDS = [
    kind_of(sampled, place, remembered, length, depth, rank)
    for sampled, place, remembered, length, depth, rank in itertools.product(
        (False, True), DraftersWord, (False, True), (2, 3, 4, 6, 9, 16), (1, 2, 4, 8), (0, 1)
    )
]


def guesses(
    rates: HitRates, *candidates: TokenCandidate, drafted: TokenTree | None = None, least: float = 0.1, nodes: int = 99
) -> Guesses:
    made = Guesses(rates, HitRatePrior(), False, drafted, least)
    for candidate in candidates:
        made.add(candidate, 8, nodes)
    return made


def own(*token_ids: int, length: int = LONG) -> TokenCandidate:
    return TokenCandidate(token_ids, length, False)


def test_every_kind_of_guess_has_its_own_number() -> None:
    assert sorted(KINDS) == list(range(len(KINDS)))
    assert kind_of(False, DraftersWord.ALONE, False, 99, 99, 9) == kind_of(False, DraftersWord.ALONE, False, 16, 8, 1)
    assert all(0 < HitRates().rate(kind) <= MOST_CERTAIN for kind in KINDS)


@pytest.mark.parametrize("truth", [0.05, 0.4, 0.9])
def test_rates_become_what_is_observed_and_follow_when_that_changes(truth: float) -> None:
    rng = random.Random(4)
    rates, kind = HitRates(), kind_of(True, DraftersWord.AGAINST, False, 3, 1, 0)
    for rate in (truth, 1 - truth):
        for _ in range(3000):
            rates.count(kind, rng.random() < rate)
        assert rates.rate(kind) == pytest.approx(rate, abs=0.06)


def test_candidates_become_one_tree_and_each_nodes_log_prob_is_its_kinds_rate() -> None:
    rates = HitRates()
    tree = guesses(rates, own(1, 2, 3), own(1, 4, length=9), least=0.05).tree()
    assert list(tree.paths()) == [(1,), (1, 2), (1, 2, 3), (1, 4)]
    assert tree.source_names == (SOURCE,)
    kinds = [(LONG, 1, 0), (LONG, 2, 0), (LONG, 3, 0), (9, 2, 1)]
    for log_prob, (length, depth, rank) in zip(tree.log_probs, kinds, strict=True):
        rate = rates.rate(kind_of(False, DraftersWord.ALONE, False, length, depth, rank))
        assert math.exp(log_prob) == pytest.approx(rate)


@pytest.mark.parametrize("least", [0.9, 0.5, 0.3, 0.1])
def test_nothing_less_likely_than_the_least_is_proposed(least: float) -> None:
    tree = guesses(HitRates(), own(*range(20)), own(9, 8, length=4), own(7, length=2), least=least).tree()
    assert all(math.exp(value) >= least - 1e-9 for value in tree.path_log_probs)
    longer = guesses(HitRates(), own(*range(20)), own(9, 8, length=4), own(7, length=2), least=least / 3).tree()
    assert set(tree.paths()) < set(longer.paths())


def test_a_tree_that_gains_too_little_is_left_out() -> None:
    drafted = chain([1], [math.log(0.5)])
    made = guesses(HitRates(), own(1, 2), drafted=drafted, least=0.01)
    tree = made.tree()
    assert made.gain == pytest.approx(math.exp(tree.path_log_probs[1]))
    assert made.tree(min_gain=0.99 * made.gain) == tree
    assert made.tree(min_gain=1.01 * made.gain) == EMPTY_TREE


def test_a_number_of_nodes_is_kept_to() -> None:
    tree = guesses(HitRates(), own(1, 2, 3), own(4, 5), own(6), least=1e-9, nodes=4).tree()
    assert list(tree.paths()) == [(1,), (1, 2), (1, 2, 3), (4,)]


def test_what_drafters_have_is_followed_and_nothing_to_add_is_an_empty_tree() -> None:
    drafted = chain([1, 2, 3], [-0.1, -0.2, -0.3])
    assert guesses(HitRates(), own(1, 2, 3), drafted=drafted).tree() == EMPTY_TREE
    tree = guesses(HitRates(), own(1, 2, 3, 4), drafted=drafted).tree()
    assert tree.token_ids == (1, 2, 3, 4)
    assert tree.log_probs[:3] == drafted.log_probs


def test_a_guess_against_the_drafters_needs_more_than_one_behind_them() -> None:
    rates, drafted = HitRates(), chain([1], [-0.01])
    assert guesses(rates, own(2), drafted=drafted, least=0.4).tree() == EMPTY_TREE
    assert len(guesses(rates, own(1, 2), drafted=drafted, least=0.4).tree()) == 2
    # Until it turns out that the drafters are the ones who err: guesses are counted, proposed or not.
    for _ in range(100):
        guesses(rates, own(2), drafted=drafted, least=0.4).learn([2, 9])
    assert guesses(rates, own(2), drafted=drafted, least=0.4).tree().token_ids == (2,)


def test_guesses_are_counted_where_their_parents_were_right_and_nowhere_else() -> None:
    rates = HitRates()
    before = [rates.rate(kind) for kind in sorted(KINDS)]
    made = guesses(rates, own(1, 2), own(5, 6, length=9), least=1e-9)
    made.learn([1, 3])
    changed = {kind for kind, rate in enumerate(before) if rates.rate(kind) != rate}
    first, second, other = (LONG, 1, 0), (LONG, 2, 0), (9, 1, 1)
    assert changed == {kind_of(False, DraftersWord.ALONE, False, *one) for one in (first, second, other)}
    assert (
        rates.rate(kind_of(False, DraftersWord.ALONE, False, *first))
        > before[kind_of(False, DraftersWord.ALONE, False, *first)]
    )
    assert (
        rates.rate(kind_of(False, DraftersWord.ALONE, False, *second))
        < before[kind_of(False, DraftersWord.ALONE, False, *second)]
    )


def test_what_drafters_proposed_is_not_the_caches_to_count() -> None:
    rates, prior = HitRates(), HitRatePrior()
    made = Guesses(rates, prior, False, chain([1], [-0.1]), 0.01)
    made.add(own(1, 2), 8, 9)
    made.learn([1, 2])
    assert prior.hits == 1
    assert 0 < prior.expected < 1


def test_the_outlook_of_a_request_moves_its_probabilities_within_bounds() -> None:
    good, bad, known = HitRatePrior(), HitRatePrior(), HitRatePrior()
    for _ in range(50):
        good.hits, good.expected = good.hits + 1, good.expected + 0.5
        bad.expected += 0.5
    assert bad.factor < 1 < good.factor
    assert HitRatePrior().factor == 1
    known.know(0, 1000)
    assert bad.factor <= known.factor < 1
    # What is only known of others is outweighed by a request's own guesses.
    known.hits, known.expected = 100.0, 80.0
    assert known.factor > 1
    known.know(0, 0)
    assert known.factor > 1


def test_the_root_of_nothing_drafted_is_a_place_where_drafters_say_nothing() -> None:
    rates = HitRates()
    tree = guesses(rates, own(1), drafted=EMPTY_TREE, least=0.3).tree()
    assert tree.parents == (ROOT,)
    assert math.exp(tree.log_probs[0]) == pytest.approx(
        rates.rate(kind_of(False, DraftersWord.BEYOND, False, LONG, 1, 0))
    )
