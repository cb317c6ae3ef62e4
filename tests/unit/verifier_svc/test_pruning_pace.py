"""When early pruning is worth its step."""

from __future__ import annotations

import pytest

from verifier_svc.draw_rule import Threshold
from verifier_svc.pruning_pace import TRY_ONE_IN, PruningPace, PruningSettings

OWN_S, ROW_S = 0.005, 0.0002


def settings(recall: float = 1.0, **changes: object) -> PruningSettings:
    kept = {"share_behind": 0.5, "free_rows": 16, "row_multiple": 4, **changes}
    return PruningSettings((Threshold(0.0, -5.0, recall),), **kept)  # type: ignore[arg-type]


def knowing(pace: PruningPace) -> PruningPace:
    """A pace that has seen passes of many sizes."""
    for _ in range(20):
        for rows in (20, 40, 64, 100):
            pace.pass_over(rows, OWN_S + ROW_S * rows)
    return pace


def test_nothing_is_pruned_before_it_is_known_what_a_row_costs() -> None:
    pace = PruningPace(settings())
    assert not pace.prunes(64, 60)
    assert knowing(pace).prunes(64, 60)


def test_a_pass_is_pruned_where_its_saved_rows_take_longer_than_the_step() -> None:
    pace = knowing(PruningPace(settings()))
    assert pace.prunes(64, 60)
    # Half of 60 nodes go: 28 rows of 64 and 36 that are computed, through half of the layers, or 2.8 ms.
    pace.pruned(60, 30, 0.0027)
    assert pace.prunes(64, 60)
    assert not pace.prunes(40, 36)
    slow = knowing(PruningPace(settings()))
    slow.pruned(60, 30, 0.0029)
    assert not slow.prunes(64, 60)


def test_rows_that_cost_nothing_are_not_worth_a_step() -> None:
    pace = knowing(PruningPace(settings()))
    pace.pruned(60, 30, 1e-6)
    assert pace.prunes(64, 60)
    assert not pace.prunes(16, 15)
    # Two nodes less make no row less in passes of a multiple of four rows, where padding takes their place.
    assert not pace.prunes(32, 4)
    assert not pace.prunes(64, 0)
    free = PruningPace(settings())
    for _ in range(20):
        for rows in (20, 40, 64, 100):
            free.pass_over(rows, OWN_S)
    assert not free.prunes(100, 99)


@pytest.mark.parametrize(("recall", "expected"), [(0.999, True), (0.95, False)])
def test_what_is_lost_counts(recall: float, expected: bool) -> None:
    """A sixth of a pass is saved; two tokens for each that is lost are not."""
    pace = knowing(PruningPace(settings(recall)))
    pace.pruned(60, 18, 0.0)
    assert pace.prunes(64, 60) is expected


def test_one_pass_in_so_many_is_run_the_other_way() -> None:
    for share, usual in ((30, True), (0, False)):
        pace = knowing(PruningPace(settings()))
        pace.pruned(60, share, 0.001)
        asked = [pace.prunes(64, 60) for _ in range(2 * TRY_ONE_IN)]
        assert asked.count(not usual) == 2
        # Where all candidates together would not pay, it is not even tried.
        assert not any(pace.prunes(12, 11) for _ in range(2 * TRY_ONE_IN))


def test_it_is_given_up_where_nothing_is_pruned_any_more() -> None:
    pace = knowing(PruningPace(settings()))
    pace.pruned(60, 40, 0.0005)
    passes = 0
    while pace.prunes(64, 60):
        pace.pruned(60, 0, 0.0005)
        passes += 1
    assert 1 <= passes < TRY_ONE_IN


def test_for_measurement_every_pass_is_pruned() -> None:
    pace = PruningPace(settings(is_forced=True))
    assert pace.prunes(5, 4)
    assert not pace.prunes(5, 0)
