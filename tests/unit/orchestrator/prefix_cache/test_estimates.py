"""How long guesses stay right, and what drafters usually promise."""

from __future__ import annotations

import random

import pytest

from coppice.core.tree import EMPTY_TREE, chain
from orchestrator.prefix_cache.estimates import CachePromise, MatchLengthEstimate

USUAL = 5.5


@pytest.mark.parametrize("wrong", [0.02, 0.1, 0.3])
def test_what_is_expected_is_what_comes_true(wrong: float) -> None:
    """Of an output whose guesses leave it at random, after many rounds of six tokens."""
    rng = random.Random(0)
    record = MatchLengthEstimate()
    for _ in range(4000):
        record.learn([0] * 32, [int(rng.random() < wrong) for _ in range(6)])
    runs = [next((n for n in range(32) if rng.random() < wrong), 32) for _ in range(20_000)]
    assert record.expected_tokens(32) == pytest.approx(sum(runs) / len(runs), rel=0.06)


def test_guesses_go_ahead_of_drafters_once_a_round_agreed_and_no_longer_once_they_left_the_output() -> None:
    record = MatchLengthEstimate()
    assert 1 < record.expected_tokens(32) < USUAL
    record.learn([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6])
    assert record.expected_tokens(32) > USUAL
    # What lies behind a wrong guess counts for nothing.
    record.learn([1, 2, 3, 4, 5, 6, 7], [1, 9, 3, 4, 5, 6])
    assert record.expected_tokens(32) < USUAL
    assert record.expected_tokens(1) < 1


def test_what_followed_the_very_same_prompt_goes_ahead_from_the_start() -> None:
    record = MatchLengthEstimate()
    record.repeats()
    assert record.expected_tokens(32) > 2 * USUAL
    for _ in range(6):
        record.learn([1], [2])
    assert record.expected_tokens(32) < USUAL


def test_an_output_goes_by_what_others_were_promised_until_it_knows_better() -> None:
    usual = CachePromise()
    first = usual.of_output()
    assert first.tokens == 0
    first.add(EMPTY_TREE)
    assert (first.tokens, usual.tokens) == (0, 0)
    first.add(chain([1, 2], [0.0, 0.0]))
    assert (first.tokens, usual.tokens) == (2, 2)
    second = usual.of_output()
    assert second.tokens == 2
    for _ in range(30):
        second.add(chain([1, 2, 3, 4, 5, 6], [0.0] * 6))
    assert second.tokens == pytest.approx(6, abs=0.01)
    assert 2 < usual.tokens < 4
    assert first.tokens == 2
