"""Sparse draft distributions: valid by construction, renormalised by everyone alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.core.draft_distribution import DraftDistribution, truncated
from coppice.core.errors import InvalidTreeError

distributions = st.lists(
    st.tuples(st.integers(0, 99), st.floats(2**-20, 1, width=32)),
    min_size=2,
    max_size=8,
    unique_by=lambda pair: pair[0],
).map(lambda pairs: DraftDistribution(*map(tuple, zip(*pairs, strict=True))))


@given(distributions)
def test_probabilities_are_shares_of_the_weights(distribution: DraftDistribution) -> None:
    assert distribution.probabilities.sum() == pytest.approx(1, abs=1e-15)
    total = math.fsum(distribution.weights)
    for token, weight in zip(distribution.token_ids, distribution.weights, strict=True):
        assert distribution.probability(token) == pytest.approx(weight / total, rel=1e-14)


@given(distributions, st.data())
def test_what_is_left_without_a_token_keeps_the_other_weights(
    distribution: DraftDistribution, data: st.DataObject
) -> None:
    token = data.draw(st.sampled_from(distribution.token_ids))
    left = distribution.without(token)
    kept = dict(zip(distribution.token_ids, distribution.weights, strict=True))
    del kept[token]
    assert dict(zip(left.token_ids, left.weights, strict=True)) == kept


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("max_tokens", [1, 5, 50, 80])
def test_truncation_keeps_the_likeliest_tokens_and_their_odds(temperature: float, max_tokens: int) -> None:
    logits = np.random.default_rng(0).normal(0, 3, 50).astype(np.float32)
    softmax = np.exp(logits.astype(np.float64) / temperature)
    softmax /= softmax.sum()
    distribution = truncated(logits, temperature, max_tokens)
    likeliest = np.argsort(-softmax)[:max_tokens]
    assert distribution.token_ids == tuple(likeliest.tolist())
    assert distribution.probabilities == pytest.approx(softmax[likeliest] / softmax[likeliest].sum(), rel=1e-6)


def test_weights_cross_a_wire_of_float32_unchanged() -> None:
    distribution = truncated(np.random.default_rng(1).normal(0, 3, 50).astype(np.float32), 0.7, 16)
    assert tuple(float(np.float32(weight)) for weight in distribution.weights) == distribution.weights


def test_tokens_that_cannot_be_drawn_are_left_out() -> None:
    logits = np.array([0, -np.inf, 3, -1000], np.float32)
    assert truncated(logits, 1.0, 4).token_ids == (2, 0)


@pytest.mark.parametrize(
    ("token_ids", "weights", "complaint"),
    [
        ((), (), "0 tokens"),
        ((1, 2), (1.0,), "2 tokens, 1 weights"),
        ((1, 1), (1.0, 1.0), "twice"),
        ((1, -1), (1.0, 1.0), "below 0"),
        ((1, 2), (1.0, 0.0), "not a finite number above 0"),
        ((1, 2), (1.0, -1.0), "not a finite number above 0"),
        ((1, 2), (math.nan, 1.0), "not a finite number above 0"),
        ((1, 2), (1.0, math.nan), "not a finite number above 0"),
        ((1, 2), (1.0, math.inf), "not a finite number above 0"),
    ],
)
def test_an_invalid_distribution_cannot_be_built(
    token_ids: tuple[int, ...], weights: tuple[float, ...], complaint: str
) -> None:
    with pytest.raises(InvalidTreeError, match=complaint):
        DraftDistribution(token_ids, weights)


def test_as_many_tokens_as_are_asked_for_keep_the_least_weight_there_is() -> None:
    logits = np.array([0, -np.inf, 3, -1000, -np.inf], np.float32)
    kept = truncated(logits, 1.0, 5, min_tokens=4)
    assert kept.token_ids == (2, 0, 3, 1)
    assert kept.probabilities[:2] == pytest.approx(truncated(logits, 1.0, 5).probabilities, rel=1e-12)
    assert 0 < kept.probabilities[2] == kept.probabilities[3] < 1e-37
    assert kept.without(2).without(0).probabilities.tolist() == [0.5, 0.5]


def test_where_nothing_may_be_drawn_every_token_is_as_likely() -> None:
    nothing = np.full(6, -np.inf, np.float32)
    assert truncated(nothing, 1.0, 4, min_tokens=3).probabilities == pytest.approx([1 / 3] * 3)
