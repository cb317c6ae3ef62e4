"""What one drafter's tree would add to another's, and how long that is worth waiting for."""

from __future__ import annotations

import pytest

from orchestrator.request.source_records import FEWEST_ROUNDS, SourceRecords


def known(rounds: int = FEWEST_ROUNDS, seconds: float = 0.010) -> SourceRecords:
    """Of two tokens each that the quick one has right, and six of the slow one, which takes so long."""
    records = SourceRecords()
    for _ in range(rounds):
        records.compare({"quick": 2, "slow": 6})
        records.took("slow", seconds)
        records.took("quick", 0.002)
    return records


@pytest.mark.parametrize(("tokens_per_s", "waits"), [(499, True), (501, False)])
def test_a_tree_is_waited_for_that_adds_more_than_comes_in_that_time(tokens_per_s: float, waits: bool) -> None:
    """Four tokens in the eight milliseconds that it still takes."""
    wait_s = known().worthwhile_wait_s(["quick"], ["slow"], 0.002, tokens_per_s)
    assert wait_s == (pytest.approx(0.008) if waits else 0)


def test_nobody_waits_for_the_worse_tree() -> None:
    assert known().worthwhile_wait_s(["slow"], ["quick"], 0.001, 1) == 0


def test_nothing_is_concluded_from_a_few_rounds() -> None:
    assert known(FEWEST_ROUNDS - 1).worthwhile_wait_s(["quick"], ["slow"], 0.002, 1) == 0
    assert SourceRecords().worthwhile_wait_s(["quick"], ["slow"], 0.002, 1) == 0


def test_one_that_is_later_than_usual_is_given_up() -> None:
    records = known()
    for number in range(400):
        records.took("slow", 0.010 + (0.001 if number % 2 else -0.001))
    assert records.worthwhile_wait_s(["quick"], ["slow"], 0.010, 1) == pytest.approx(0.002, rel=0.2)
    assert records.worthwhile_wait_s(["quick"], ["slow"], 0.013, 1) == 0


def test_what_is_there_already_counts_by_the_best_of_it() -> None:
    records = known()
    for _ in range(FEWEST_ROUNDS):
        records.compare({"good": 6, "slow": 6})
    assert records.worthwhile_wait_s(["quick"], ["slow"], 0.002, 1) > 0
    assert records.worthwhile_wait_s(["quick", "good"], ["slow"], 0.002, 1) == 0
