"""What a source costs: seen when it is asked and when it is not, and believed by what hangs on it."""

from __future__ import annotations

import pytest

from orchestrator.planner.source_value import SourceValue

LOAD = 4


def known(share: float, num_passes: int = 12) -> SourceValue:
    """A source that makes rounds half as long again, seen in so many passes with it, and without."""
    source = SourceValue(share=share)
    for _ in range(num_passes):
        source.took(0.010, 0.0, LOAD, is_joint=True)
        source.took(0.015, 1.0, LOAD, is_joint=True)
    return source


def test_what_everybody_asks_costs_as_much_as_is_certain_and_what_is_to_be_asked_by_more_as_much_as_was_seen() -> None:
    assert known(1.0).cost == pytest.approx(0.25, rel=0.05)
    assert known(1.0, 1000).cost == pytest.approx(0.5, rel=0.05)
    assert known(0.25).cost == known(0.0).cost == pytest.approx(0.5)


@pytest.mark.parametrize(("is_joint", "cost"), [(True, 0.5), (False, 0.0)])
def test_one_request_that_asks_holds_up_all_that_wait_together_and_few_others(*, is_joint: bool, cost: float) -> None:
    source = SourceValue(share=0.0)
    for _ in range(12):
        source.took(0.010, 0.0, LOAD, is_joint)
        source.took(0.015, 0.25, LOAD, is_joint)
    assert source.cost == pytest.approx(cost)


def test_times_of_another_load_say_nothing() -> None:
    source = SourceValue()
    source.took(0.010, 0.0, LOAD, is_joint=True)
    source.took(0.030, 1.0, 4 * LOAD, is_joint=True)
    assert source.cost == 0.0
