"""How long a drafter may draft ahead, on a clock that the test sets."""

from __future__ import annotations

import pytest

from drafter_svc.search.ahead_pace import MAKING_SHARE, READING_SHARE, AheadPace, RoundLengths


class Rounds:
    """Rounds of a sequence, one after another, on a clock of their own."""

    def __init__(self, all_rounds: RoundLengths | None = None) -> None:
        self.now_s = 100.0
        self.pace = AheadPace(lambda: self.now_s, all_rounds)

    def take(self, *lengths_s: float) -> None:
        for length_s in lengths_s:
            self.pace.expect()
            self.now_s += length_s
            self.pace.outcome_came()

    def times_s(self, step_s: float = 0.01) -> tuple[float, float]:
        """How long into the next round one may read, and make trees."""
        begin_s = self.now_s
        self.pace.expect()
        ends = []
        for may_go_on in (lambda: self.pace.may_read, lambda: self.pace.may_make):
            while may_go_on() and self.now_s < begin_s + 1000:
                self.now_s += step_s
            ends.append(self.now_s - begin_s)
        return ends[0], ends[1]


def test_until_a_round_was_seen_there_is_all_the_time() -> None:
    rounds = Rounds()
    rounds.pace.expect()
    rounds.now_s += 1e6
    assert rounds.pace.may_read
    assert rounds.pace.may_make


def test_reading_ends_first_and_both_end_before_the_usual_outcome() -> None:
    rounds = Rounds()
    rounds.take(*[2.0] * 8)
    read_s, make_s = rounds.times_s()
    assert read_s == pytest.approx(2.0 * READING_SHARE, abs=0.02)
    assert make_s == pytest.approx(2.0 * MAKING_SHARE, abs=0.02)
    assert read_s < make_s < 2.0


def test_short_rounds_count_more_than_long_ones_and_a_single_one_does_not_decide() -> None:
    rounds = Rounds()
    rounds.take(0.1, *[2.0] * 4, *[9.0] * 3)
    assert rounds.times_s()[0] == pytest.approx(2.0 * READING_SHARE, abs=0.02)


def test_what_is_long_ago_is_forgotten() -> None:
    rounds = Rounds()
    rounds.take(*[0.1] * 8, *[4.0] * 8)
    assert rounds.times_s()[0] == pytest.approx(4.0 * READING_SHARE, abs=0.02)


def test_an_outcome_that_nobody_expected_says_nothing() -> None:
    rounds = Rounds()
    rounds.take(2.0)
    rounds.now_s += 50.0
    rounds.pace.outcome_came()
    assert rounds.times_s()[0] == pytest.approx(2.0 * READING_SHARE, abs=0.02)


def test_a_sequence_whose_first_round_read_its_prompt_goes_by_the_rounds_of_others() -> None:
    all_rounds = RoundLengths()
    Rounds(all_rounds).take(*[2.0] * 8)
    one = Rounds(all_rounds)
    assert one.times_s()[0] == pytest.approx(2.0 * READING_SHARE, abs=0.02)
    one.take(50.0)
    assert one.times_s()[0] == pytest.approx(2.0 * READING_SHARE, abs=0.02)
    # Its own count alone once there are some.
    one.take(*[4.0] * 3)
    assert one.times_s()[0] == pytest.approx(4.0 * READING_SHARE, abs=0.02)
