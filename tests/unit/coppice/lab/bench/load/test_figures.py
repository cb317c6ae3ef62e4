"""Figures of answers that were made by hand."""

from __future__ import annotations

import pytest

from coppice.lab.bench.client import Fate
from coppice.lab.bench.load import figures
from coppice.lab.bench.load.figures import Span, Targets
from tests.unit.coppice.lab.bench.made_up import answer

WHOLE = Span(0.0, 10.0)


def test_tokens_count_when_they_come_whether_their_request_ends_or_not() -> None:
    answers = [answer([(0.5, 1), (1.0, 4), (2.0, 8)]), answer([(1.5, 16), (3.0, 32)], Fate.CUT)]
    # The span has its beginning and not its end.
    assert figures.tokens_per_s(answers, Span(1.0, 3.0)) == (4 + 8 + 16) / 2.0


def test_latencies_belong_to_the_span_in_which_they_end() -> None:
    early, late = answer([(0.5, 2), (1.5, 3), (4.0, 1)], intended_s=0.2), answer([(2.5, 1)], intended_s=0.5)
    assert figures.ttfts_s([early, late], WHOLE) == [pytest.approx(0.3), 2.0]
    assert figures.ttfts_s([early, late], Span(1.0, 3.0)) == [2.0]
    # One gap per delta, however many tokens came with it.
    assert figures.gaps_s([early, late], WHOLE) == [1.0, 2.5]
    assert figures.gaps_s([early, late], Span(0.0, 4.0)) == [1.0]
    assert figures.completed([early, late], Span(0.0, 4.0)) == [late]
    # Six tokens: five after the first.
    assert figures.tpots_s([early, late]) == [pytest.approx(3.5 / 5)]


def test_goodput_counts_completed_requests_that_meet_both_targets() -> None:
    targets = Targets(ttft_s=1.0, tpot_s=0.1)
    good = answer([(1.5, 1), (2.0, 5)], intended_s=0.5)
    single = answer([(1.0, 1)])
    late_first = answer([(1.6, 1), (2.0, 5)], intended_s=0.5)
    slow = answer([(1.0, 1), (2.0, 5)], intended_s=0.5)
    # As good as the first, but not completed.
    cut = answer([(1.5, 1), (2.0, 5)], Fate.CUT, intended_s=0.5)
    refused = answer([], Fate.REFUSED)
    assert figures.num_good([good, single], targets) == 2
    assert figures.num_good([late_first, slow, cut, refused], targets) == 0


def level(*parts: tuple[float, float]) -> list[float]:
    """Bins of a level: for so many seconds such a speed, one part behind the other."""
    return [speed for seconds, speed in parts for _ in range(round(seconds / figures.BIN_S))]


@pytest.mark.parametrize(
    ("bins", "expected"),
    [
        (level((12, 100)), 0.0),
        (level((0.5, 0), (11.5, 100)), 0.5),
        (level((5, 30), (7, 100)), 5.0),
        (level((5, 200), (7, 100)), 5.0),
        # Past the middle the lasting speed is a mean of both, and a second that begins a little before is near it.
        (level((6.5, 30), (5.5, 100)), 6.25),
        # On its way up it passes the lasting speed, and does not stay.
        (level((2, 30), (1, 100), (2, 180), (7, 100)), 5.0),
        # It stays for two seconds, and not for less.
        (level((2, 30), (1.75, 100), (2, 180), (6.25, 100)), 5.75),
        (level((2, 30), (2, 100), (2, 180), (6, 100)), 2.0),
        (level((1.75, 100)), None),
        (level((6, 100), (6, 0)), None),
        ([], None),
    ],
)
def test_a_level_has_settled_when_it_stays_near_its_lasting_speed_for_two_seconds(
    bins: list[float], expected: float | None
) -> None:
    assert figures.settle_s(bins) == expected


@pytest.mark.parametrize("half_s", [1.0, 1.5, 2.0, 3.0])
def test_a_controller_that_swings_to_and_fro_never_settles(half_s: float) -> None:
    swings = level(*[(half_s, 140), (half_s, 60)] * 8)[:48]
    assert figures.settle_s(swings) is None
    # By a little it may.
    assert figures.settle_s(level(*[(half_s, 110), (half_s, 95)] * 8)[:48]) is not None


@pytest.mark.parametrize(
    ("bins", "expected"),
    [
        ([100, 100, 100, 100], 0.0),
        # Nothing at first, then as fast as ever: half a second of four bins.
        ([0, 0, 100, 100], 0.5),
        ([0, 200, 200, 0], 0.0),
        ([200, 200, 100, 100], -0.5),
        # The bin in the middle of an odd number belongs to neither half.
        ([50, 7, 100], 0.125),
        ([100, 100, 0, 0], None),
        ([100], None),
        ([], None),
    ],
)
def test_the_beginning_of_a_level_costs_what_it_is_behind_the_rest(bins: list[float], expected: float | None) -> None:
    assert figures.lost_s(bins) == expected
