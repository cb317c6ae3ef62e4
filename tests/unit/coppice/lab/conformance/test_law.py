"""Whether draws are from a law: said of honest ones almost always, and of others almost never."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from coppice.lab.conformance.law import Law, _bound, contradiction

LAW: Law = {(token,): share for token, share in enumerate((0.4, 0.3, 0.2, 0.06, 0.03, 0.009, 0.001))}
DRAWS = 400


def drawn(shares: list[float], seed: int) -> Counter[tuple[int, ...]]:
    tokens = np.random.default_rng(seed).choice(len(shares), DRAWS, p=shares)
    return Counter((int(token),) for token in tokens)


def test_draws_from_the_law_do_not_contradict_it() -> None:
    shares = list(LAW.values())
    assert not [reason for seed in range(3000) if (reason := contradiction(drawn(shares, seed), LAW))]


def test_draws_from_another_law_do() -> None:
    for shares in ([0.6, 0.2, 0.1, 0.06, 0.03, 0.009, 0.001], [0.3, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05]):
        assert all(contradiction(drawn(shares, seed), LAW).startswith("chi-square of 400") for seed in range(100))


def test_an_output_that_the_law_does_not_give_is_named() -> None:
    assert "(9,)" in contradiction(Counter({(0,): 3, (9,): 1}), LAW)


def test_a_law_of_one_output_is_kept_by_it_alone() -> None:
    assert not contradiction(Counter({(4,): 50}), {(4,): 1.0})
    assert contradiction(Counter({(5,): 1, (4,): 50}), {(4,): 1.0})


@pytest.mark.parametrize("degrees", [1, 3, 10, 26])
def test_the_bound_is_what_few_sums_of_squares_exceed(degrees: int) -> None:
    sums = (np.random.default_rng(degrees).normal(size=(100_000, degrees)) ** 2).sum(1)
    assert sums.max() < 1.1 * _bound(degrees)
    assert np.quantile(sums, 0.9999) < _bound(degrees) < 1.9 * np.quantile(sums, 0.9999)
