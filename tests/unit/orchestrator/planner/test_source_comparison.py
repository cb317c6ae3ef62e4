"""Sources compared: who is better alone, or all together, in how few rounds."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from orchestrator.planner.source_comparison import FEWEST_ROUNDS, LONGEST_TURN, TURN_ROUNDS, SourceComparison

PASS_S = 0.01


def compare(
    comparison: SourceComparison,
    accepted: Mapping[tuple[str, ...], int],
    seconds: Mapping[tuple[str, ...], float] | None = None,
    plain: float = 0.0,
) -> dict[tuple[str, ...], int]:
    """Rounds of each turn until it is over, in which promises are kept."""
    rounds: dict[tuple[str, ...], int] = {}
    while not comparison.is_over:
        turn = comparison.turn
        rounds[turn] = rounds.get(turn, 0) + 1
        comparison.learn(float(accepted[turn]), accepted[turn], come=turn)
        comparison.pass_over((seconds or {}).get(turn, PASS_S), plain)
    return rounds


def test_the_best_is_who_has_the_most_tokens_in_the_same_time() -> None:
    comparison = SourceComparison(("a", "b", "c"))
    rounds = compare(comparison, {("a",): 3, ("b",): 4, ("c",): 3, ("a", "b", "c"): 4}, {("a", "b", "c"): 0.012})
    assert comparison.turn == ("b",)
    assert comparison.ranked[0] == "b"
    assert sorted(comparison.ranked) == ["a", "b", "c"]
    # Of four, two are left for another turn.
    assert sorted(rounds.values()) == [TURN_ROUNDS, TURN_ROUNDS, 2 * TURN_ROUNDS, 2 * TURN_ROUNDS]


def test_all_together_are_the_best_where_they_add_more_than_they_cost() -> None:
    comparison = SourceComparison(("a", "b"))
    compare(comparison, {("a",): 3, ("b",): 3, ("a", "b"): 4}, {("a", "b"): 0.012})
    assert comparison.turn == ("a", "b")


def test_who_needs_more_time_than_its_tokens_are_worth_is_not_the_best() -> None:
    comparison = SourceComparison(("slow", "quick"))
    accepted = {("slow",): 4, ("quick",): 3, ("slow", "quick"): 4}
    compare(comparison, accepted, {("slow",): 0.014, ("slow", "quick"): 0.015})
    assert comparison.turn == ("quick",)


def test_a_turn_of_what_is_hopeless_is_a_short_one() -> None:
    comparison = SourceComparison(("good", "bad"))
    rounds = compare(comparison, {("good",): 5, ("bad",): 1, ("good", "bad"): 5}, {("good", "bad"): 0.05})
    # Nor has it, or who is left, a second one.
    assert rounds == {("good",): TURN_ROUNDS, ("bad",): FEWEST_ROUNDS, ("good", "bad"): FEWEST_ROUNDS}


@pytest.mark.parametrize("plain", [155.0, 400.0])
def test_it_is_soon_over_where_nobody_is_better_than_plain_decoding(plain: float) -> None:
    comparison = SourceComparison(("a", "b", "c", "d"))
    accepted = {(name,): 0.2 for name in "abcd"} | {("a", "b", "c", "d"): 0.5}
    rounds = compare(comparison, accepted, plain=plain)
    # Not as good, or hopeless beside it: nobody has a second turn.
    assert set(rounds.values()) == {TURN_ROUNDS if plain == 155 else FEWEST_ROUNDS}


def test_rounds_before_all_trees_come_count_for_nothing_and_who_is_silent_loses() -> None:
    comparison = SourceComparison(("late", "silent"))
    for _ in range(5):
        comparison.learn(0.0, 0, come=())
        comparison.pass_over(PASS_S)
    for _ in range(TURN_ROUNDS):
        comparison.learn(2.0, 2, come=("late",))
        comparison.pass_over(PASS_S)
    num_passes = 0
    while comparison.turn == ("silent",):
        num_passes += 1
        comparison.learn(0.0, 0, come=())
        comparison.pass_over(PASS_S)
    assert num_passes == LONGEST_TURN
    while not comparison.is_over:
        # Both together are as good as the one of them that says something, but not all trees ever come.
        comparison.learn(2.0, 2, come=("late",))
        comparison.pass_over(PASS_S)
    assert comparison.turn == ("late",)


def test_promises_that_are_not_kept_count_for_less() -> None:
    comparison = SourceComparison(("honest", "boaster"))
    while not comparison.is_over:
        promised, accepted = (4.0, 1) if comparison.turn == ("boaster",) else (2.0, 2)
        comparison.learn(promised, accepted, come=comparison.turn)
        comparison.pass_over(PASS_S if len(comparison.turn) == 1 else 2 * PASS_S)
    assert comparison.turn == ("honest",)


def test_a_time_that_says_nothing_is_no_time() -> None:
    comparison = SourceComparison(("a", "b"))
    while not comparison.is_over:
        is_odd = comparison.turn == ("a",)
        comparison.learn(3.0 if is_odd else 2.0, 3 if is_odd else 2, come=comparison.turn)
        comparison.pass_over(None if is_odd and comparison._num_rounds % 2 else PASS_S)
    assert comparison.turn == ("a",)


def test_one_alone_is_no_choice() -> None:
    with pytest.raises(ValueError, match="better"):
        SourceComparison(("a",))
