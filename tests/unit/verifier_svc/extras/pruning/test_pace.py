"""When early pruning is worth its step."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from verifier_svc.extras.pruning.pace import COMPARE, LEAST_PAIRS, ON, TRY_ONE_IN, PruningPace, PruningSettings
from verifier_svc.verify.draw_rule import Threshold

# Seconds of a pass of so many rows, by whether it is pruned.
Machine = Callable[[int, bool], float]


def settings(recall: float = 1.0, **changes: object) -> PruningSettings:
    kept = {"free_rows": 16, "row_multiple": 4, **changes}
    return PruningSettings((Threshold(0.0, -5.0, recall),), **kept)  # type: ignore[arg-type]


def machine(saved: float, own_s: float = 0.005) -> Machine:
    """Pruning saves so much of what rows take."""
    return lambda rows, pruned: own_s + 0.0002 * rows * (1 - saved * pruned)


def run(pace: PruningPace, takes: Machine, num_passes: int, rows: int = 100) -> list[bool]:
    """Run passes as the pace has them; which were pruned."""
    done = []
    for _ in range(num_passes):
        pruned = pace.prunes(rows, rows - 4)
        pace.pass_over(rows, takes(rows, pruned), was_pruned=pruned)
        done.append(pruned)
    return done


def test_passes_are_pruned_in_turn_until_it_is_known_what_that_gains() -> None:
    for saved, expected in ((0.2, True), (-0.1, False)):
        pace = PruningPace(settings())
        first = run(pace, machine(saved), LEAST_PAIRS + 1)
        assert first == [bool(index % 2) for index in range(LEAST_PAIRS + 1)]
        assert set(run(pace, machine(saved), TRY_ONE_IN - 1)) == {expected}


def test_each_size_of_passes_is_known_by_itself() -> None:
    pace = PruningPace(settings())

    def pays_for_many(rows: int, pruned: bool) -> float:
        return machine(0.2)(rows, pruned) if rows > 100 else machine(-0.2)(rows, pruned)

    for rows in (30, 300):
        run(pace, pays_for_many, LEAST_PAIRS + 1, rows)
    assert not pace.prunes(30, 26)
    assert pace.prunes(300, 290)
    assert pace.prunes(310, 290)


def test_a_machine_that_slows_down_changes_nothing() -> None:
    """Passes take twice as long from one moment on, and vary by a tenth: pairs of neighbours still tell."""
    chance = random.Random(5)

    def noisy(saved: float, slower: float) -> Machine:
        return lambda rows, pruned: slower * machine(saved)(rows, pruned) * chance.uniform(0.95, 1.05)

    for saved, expected in ((0.15, True), (-0.15, False)):
        pace = PruningPace(settings())
        run(pace, noisy(saved, 1.0), 200)
        for slower in (2.0, 0.5):
            done = run(pace, noisy(saved, slower), 640)
            assert done.count(expected) >= 0.97 * len(done)


def test_rows_that_cost_nothing_are_not_worth_a_try() -> None:
    pace = PruningPace(settings())
    run(pace, machine(0.2), LEAST_PAIRS + 1, 36)
    run(pace, machine(0.2), LEAST_PAIRS + 1, 16)
    assert pace.prunes(36, 28)
    assert not pace.prunes(16, 15)
    # One node less makes no row less in passes of a multiple of four rows, where padding takes its place.
    assert not pace.prunes(36, 1)
    assert pace.prunes(33, 1)
    assert not pace.prunes(64, 0)


@pytest.mark.parametrize(("recall", "expected"), [(0.999, True), (0.95, False)])
def test_what_is_lost_counts(recall: float, expected: bool) -> None:
    """A twentieth of a pass is saved; two tokens for each that is lost are not."""
    pace = PruningPace(settings(recall))
    run(pace, machine(0.07, 0.005), LEAST_PAIRS + 1)
    assert pace.prunes(100, 90) is expected


def test_one_pass_in_so_many_is_run_the_other_way_and_what_changes_is_seen() -> None:
    pace = PruningPace(settings())
    run(pace, machine(0.2), LEAST_PAIRS + 1)
    assert run(pace, machine(0.2), 2 * TRY_ONE_IN).count(False) == 2
    # Pruning loses from now on.
    later = run(pace, machine(-0.3), 40 * TRY_ONE_IN)
    assert not any(later[-TRY_ONE_IN + 1 :][:-2])


def test_one_pass_that_was_held_up_does_not_decide() -> None:
    pace = PruningPace(settings())
    run(pace, machine(0.2), 10 * LEAST_PAIRS)
    # A hundred times as long, pruned.
    pace.pass_over(100, 2.5, was_pruned=True)
    pace.pass_over(100, machine(0.2)(100, False), was_pruned=False)
    assert pace.prunes(100, 90)


def test_for_measurement_every_pass_is_pruned_or_run_both_ways() -> None:
    pace = PruningPace(settings(switch=ON))
    assert pace.prunes(5, 4)
    assert not pace.prunes(5, 0)
    assert not pace.compares
    assert PruningPace(settings(switch=COMPARE)).compares


def test_what_both_kinds_of_passes_took_is_added_up() -> None:
    pace = PruningPace(settings())
    assert run(pace, machine(0.5, 0.0), 6, rows=50) == [False, True] * 3
    whole, pruned = pace.times[False], pace.times[True]
    assert (whole.num_passes, whole.num_rows, pruned.num_passes, pruned.num_rows) == (3, 150, 3, 150)
    assert (whole.seconds, pruned.seconds) == (pytest.approx(0.03), pytest.approx(0.015))
