"""Figures of completions, checked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coppice.completion import OriginCounts, Speculation
from coppice.lab.bench import figures
from coppice.lab.bench.contenders import Completion, PassTime


def _completion(
    num_tokens: int = 4,
    wall_s: float = 1.0,
    *,
    num_rounds: int = 1,
    forward_s: float = 0.0,
    passes: dict[int, PassTime] | None = None,
    speculation: Speculation | None = None,
) -> Completion:
    return Completion(
        token_ids=tuple(range(num_tokens)),
        wall_s=wall_s,
        ttft_s=wall_s / 2,
        num_rounds=num_rounds,
        forward_s=forward_s,
        passes=passes or {},
        speculation=speculation,
    )


def test_a_rate_is_all_tokens_over_all_time_not_a_mean_of_rates() -> None:
    assert figures.tokens_per_s([_completion(10, 1.0), _completion(10, 4.0)]) == 4.0


def test_acceptance_by_depth_adds_lists_of_different_lengths() -> None:
    deep = Speculation(0, 6, 3, 0, 0, rounds_drafted_by_depth=(4, 2), rounds_accepted_by_depth=(3, 1))
    flat = Speculation(0, 4, 1, 0, 0, rounds_drafted_by_depth=(4,), rounds_accepted_by_depth=(1,))
    completions = [_completion(speculation=deep), _completion(speculation=flat), _completion()]
    assert figures.acceptance_by_depth(completions) == [0.5, 0.5]
    counts = figures.draft_counts(completions)
    assert (counts["rounds_drafted_by_depth"], counts["rounds_accepted_by_depth"]) == ([8, 2], [4, 1])


def test_hits_are_outcomes_with_a_draft_of_all_that_a_drafter_was_told_to_expect() -> None:
    ahead = [
        Speculation(0, 9, 6, 0, 0, expected_outcomes=9, draft_ahead_hits_by_rank=(3, 0, 1), outcomes_inside_expected=2),
        Speculation(0, 1, 1, 0, 0, expected_outcomes=1, draft_ahead_hits_by_rank=(1,)),
    ]
    completions = [_completion(num_rounds=20, speculation=one) for one in ahead]
    assert figures.draft_ahead_hits(completions) == 7 / 10
    assert figures.guessed_outcomes(completions) == 5 / 8
    assert figures.draft_counts(completions)["outcomes_inside_expected"] == 2
    assert figures.draft_counts(completions)["draft_ahead_hits_by_rank"] == [4, 0, 1]


def test_early_drafts_are_rounds_whose_draft_was_there_before_the_outcome() -> None:
    origins = {"fresh": OriginCounts(4, 0, 3), "left_over": OriginCounts(2, 0, 1), "rerooted": OriginCounts(1, 0, 2)}
    drafted = [
        _completion(num_rounds=8, speculation=Speculation(0, 9, 6, 0, 0, origins=origins)),
        _completion(num_rounds=2, speculation=Speculation(0, 1, 1, 0, 0, origins={"ahead": OriginCounts(1, 0, 1)})),
    ]
    assert figures.early_drafts(drafted) == 0.4
    # Nobody was told to expect anything.
    assert figures.draft_ahead_hits(drafted) == figures.guessed_outcomes(drafted) == 0.0
    assert figures.draft_counts(drafted)["origins"]["rerooted"] == {"rounds": 1, "accepted": 2}
    assert figures.early_drafts([_completion(num_rounds=3)]) == figures.draft_ahead_hits([_completion()]) == 0.0
    apart = [replace(item, bubble_s=0.02) for item in drafted]
    assert figures.bubble_ms(apart) == pytest.approx(4.0)


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
    assert figures.repeated_4grams(outputs) == pytest.approx(share)
