"""Curves and costs."""

from __future__ import annotations

import pytest

from coppice.lab.simulator.machine import Curve, DrafterCosts, PassWork, VerifierCosts


def test_a_curve_is_straight_between_points_and_goes_on_as_its_end_did() -> None:
    curve = Curve((2, 4, 8), (1.0, 3.0, 5.0))
    assert [curve.at(size) for size in (0, 2, 3, 4, 6, 8, 12)] == [1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 7.0]
    assert Curve((5,), (2.0,)).at(100) == 2.0


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [((), ()), ((1,), ()), ((2, 1), (1.0, 2.0)), ((1, 1), (1.0, 2.0)), ((1,), (-1.0,)), ((1, 2), (2.0, 1.0)),
     ((1,), (float("nan"),)), ((-1,), (1.0,))],
)  # fmt: skip
def test_what_is_no_curve_is_refused(sizes: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"sizes|seconds"):
        Curve(sizes, seconds)


def test_a_pass_pads_its_rows_and_adds_up_sequences_context_and_prompts() -> None:
    costs = VerifierCosts(
        Curve((4, 8), (1.0, 2.0)),
        context=100,
        row_context_s=0.001,
        sequence_s=0.5,
        round_row_s=0.03,
        prompt_token_s=0.01,
        row_multiple=4,
    )
    assert costs.pass_s(PassWork(1, 3, 0, 300)) == pytest.approx(1.0 + 3 * 0.03)
    # 25 rows are computed as 28; those of rounds have 50 tokens more than the curve was measured behind.
    seconds = 7.0 + 2 * 0.5 + 5 * 50 * 0.001 + 5 * 0.03 + 20 * 0.01
    assert costs.pass_s(PassWork(3, 5, 20, 5 * 150)) == pytest.approx(seconds)
    assert costs.slower(2).pass_s(PassWork(3, 5, 20, 750)) == pytest.approx(2 * seconds)


def test_a_draft_reads_what_is_new_beside_one_token() -> None:
    costs = DrafterCosts(Curve((0, 10), (1.0, 2.0)), read_token_s=0.1)
    assert costs.draft_s(5, 1) == 1.5
    assert costs.draft_s(5, 0) == 1.5
    assert costs.draft_s(5, 11) == pytest.approx(2.5)
    assert costs.slower(3).draft_s(5, 11) == pytest.approx(7.5)
