"""What a request that has to wait is told, and when that is well founded."""

from __future__ import annotations

import random

import pytest

from orchestrator.admission.admission_pace import (
    DEFAULT_RETRY_S,
    MAX_AGE_S,
    MAX_RETRY_S,
    MIN_RETRY_S,
    MIN_SEEN,
    MIN_TOKENS,
    NUM_USUAL,
    AdmissionPace,
)


def busy(gaps_s: list[float]) -> tuple[AdmissionPace, float]:
    """A pace that has seen one place given back after each gap, and the time now."""
    pace, now_s = AdmissionPace(), 100.0
    for gap_s in gaps_s:
        now_s += gap_s
        pace.given_back(now_s, 1)
    return pace, now_s


def test_places_that_come_evenly_are_counted_off() -> None:
    pace, now_s = busy([0.5] * 40)
    # The first may come at any moment, the others half a second apart.
    assert [pace.at_least_s(now_s, wanted, 0) for wanted in (0, 1, 2, 5, 20)] == [0, 0, 0.5, 2, 9.5]
    # Twenty take 9.5 s at best, and so sixty take three times that.
    assert pace.at_least_s(now_s, 60, 0) == 28.5


def test_no_row_of_the_past_was_quicker() -> None:
    chooser = random.Random(3)
    gaps_s = [chooser.expovariate(2.0) for _ in range(30)]
    pace, now_s = busy(gaps_s)
    for wanted in range(1, 16):
        rows = [sum(gaps_s[first + 1 : first + wanted]) for first in range(len(gaps_s) - wanted + 1)]
        assert pace.at_least_s(now_s, wanted, 0) == pytest.approx(min(rows))


def test_places_that_came_all_at_once_promise_nothing() -> None:
    pace = AdmissionPace()
    pace.given_back(100.0, MIN_SEEN)
    pace.given_back(110.0, MIN_SEEN)
    assert pace.at_least_s(110.0, MIN_SEEN, 0) == 0


def test_too_little_was_seen_or_too_long_ago() -> None:
    few, now_s = busy([0.5] * (MIN_SEEN - 1))
    assert few.at_least_s(now_s, 5, 0) == 0
    enough, now_s = busy([0.5] * MIN_SEEN)
    assert enough.at_least_s(now_s, 5, 0) == 2
    assert enough.at_least_s(now_s + MAX_AGE_S - 8, 5, 0) == 2
    assert enough.at_least_s(now_s + MAX_AGE_S - 7, 5, 0) == 0
    enough.nobody_waits()
    assert enough.at_least_s(now_s, 5, 0) == 0


def test_tokens_take_as_long_as_the_fastest_outputs() -> None:
    pace = AdmissionPace()
    for index in range(MIN_SEEN):
        assert pace.at_least_s(0.0, 0, 100) == 0
        pace.ended(0.0, held_s=1.0 + index, num_tokens=50)
        # Of no account: too short.
        pace.ended(0.0, held_s=0.01, num_tokens=MIN_TOKENS - 1)
    assert pace.at_least_s(0.0, 0, 100) == pytest.approx(2.0)
    assert pace.at_least_s(MAX_AGE_S + 1, 0, 100) == 0


def test_places_are_as_many_as_have_their_tokens_in_time() -> None:
    pace = AdmissionPace()
    for _ in range(MIN_SEEN - 1):
        # Ten at once, each with fifty tokens in a second.
        pace.shared(1.0, 50, 10.0)
        pace.shared(1.0, MIN_TOKENS - 1, 10.0)
    assert pace.places_within(0.025) is None
    # Somebody who does not read, and keeps a place for a minute.
    pace.shared(60.0, 50, 10.0)
    assert pace.places_within(0.025) == 12
    assert pace.places_within(0.0001) == 1
    for _ in range(NUM_USUAL):
        pace.shared(1.0, 50, 4.0)
    assert pace.places_within(0.025) == 5


def test_the_usual_wait_is_that_of_the_last_requests() -> None:
    pace = AdmissionPace()
    for _ in range(MIN_SEEN - 1):
        pace.ended(0.0, 4.0, 10)
    assert pace.usual_wait_s(3, 4) == 0
    pace.ended(0.0, 4.0, 10)
    assert pace.usual_wait_s(3, 4) == 3.0
    for _ in range(NUM_USUAL):
        pace.ended(0.0, 2.0, 10)
    assert pace.usual_wait_s(3, 4) == 1.5


def test_the_delay_before_a_retry_is_what_the_places_ahead_take_on_average() -> None:
    pace = AdmissionPace()
    assert pace.retry_after_s(1, 4) == DEFAULT_RETRY_S
    for held_s in (1.0, 3.0):
        pace.ended(0.0, held_s, 10)
    assert pace.retry_after_s(1, 4) == 0.5
    assert pace.retry_after_s(6, 4) == 3.0
    assert pace.retry_after_s(1, 400) == MIN_RETRY_S
    assert pace.retry_after_s(4000, 4) == MAX_RETRY_S
