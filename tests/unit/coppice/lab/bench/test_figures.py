"""Figures of completions, checked by hand."""

from __future__ import annotations

import pytest

from coppice.completion import OriginCounts, Speculation, Timing
from coppice.lab.bench import figures
from coppice.lab.bench.comparison import tokens_per_s
from tests.unit.coppice.lab.bench.made_up import answer, sample


def test_a_rate_is_all_tokens_over_all_time_not_a_mean_of_rates() -> None:
    assert tokens_per_s([sample("a", wall_s, tokens=(1,) * 10) for wall_s in (1.0, 4.0)]) == 4.0
    # Requests of a batch share its time.
    assert tokens_per_s([sample("a", 2.0, size=3)]) == 6.0


def test_acceptance_by_depth_adds_lists_of_different_lengths() -> None:
    deep = Speculation(0, 6, 3, 0, 0, rounds_drafted_by_depth=(4, 2), rounds_accepted_by_depth=(3, 1))
    flat = Speculation(0, 4, 1, 0, 0, rounds_drafted_by_depth=(4,), rounds_accepted_by_depth=(1,))
    completions = [answer(speculation=deep), answer(speculation=flat), answer(counts_drafts=False)]
    assert figures.acceptance_by_depth(completions) == [0.5, 0.5]
    counts = figures.draft_counts(completions)
    assert (counts["rounds_drafted_by_depth"], counts["rounds_accepted_by_depth"]) == ([8, 2], [4, 1])


def test_hits_are_outcomes_with_a_draft_of_all_that_a_drafter_was_told_to_expect() -> None:
    ahead = [
        Speculation(0, 9, 6, 0, 0, expected_outcomes=9, draft_ahead_hits_by_rank=(3, 0, 1), outcomes_inside_expected=2),
        Speculation(0, 1, 1, 0, 0, expected_outcomes=1, draft_ahead_hits_by_rank=(1,)),
    ]
    completions = [answer(speculation=one) for one in ahead]
    assert figures.draft_ahead_hits(completions) == 7 / 10
    assert figures.guessed_outcomes(completions) == 5 / 8
    assert figures.draft_counts(completions)["outcomes_inside_expected"] == 2
    assert figures.draft_counts(completions)["draft_ahead_hits_by_rank"] == [4, 0, 1]


def test_early_drafts_are_rounds_whose_draft_was_there_before_the_outcome() -> None:
    origins = {"fresh": OriginCounts(4, 0, 3), "left_over": OriginCounts(2, 0, 1), "rerooted": OriginCounts(1, 0, 2)}
    timing = Timing(bubble_ms=20.0)
    drafted = [
        answer(timing=timing, speculation=Speculation(8, 9, 6, origins=origins)),
        answer(timing=timing, speculation=Speculation(2, 1, 1, origins={"ahead": OriginCounts(1, 0, 1)})),
    ]
    assert figures.early_drafts(drafted) == 0.4
    # Nobody was told to expect anything.
    assert figures.draft_ahead_hits(drafted) == figures.guessed_outcomes(drafted) == 0.0
    assert figures.draft_counts(drafted)["origins"]["rerooted"] == {"rounds": 1, "accepted": 2}
    assert figures.early_drafts([answer(rounds=3)]) == figures.draft_ahead_hits([answer()]) == 0.0
    assert figures.bubble_ms(drafted) == 4.0


@pytest.mark.parametrize(
    ("outputs", "share"),
    [
        ([], 0.0),
        ([[1, 2, 3]], 0.0),
        ([[1, 2, 3, 4, 5]], 0.0),
        ([[7] * 8], 0.8),
        ([[1, 2, 3, 4, 1, 2, 3, 4]], 0.2),
        # The same text in two outputs is not a loop.
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 0.0),
    ],
)
def test_repeated_4grams_counts_repeats_within_an_output(outputs: list[list[int]], share: float) -> None:
    assert figures.repeated_4grams([answer(tokens=tuple(one)) for one in outputs]) == pytest.approx(share)
