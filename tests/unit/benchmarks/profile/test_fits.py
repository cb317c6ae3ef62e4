"""Costs found again from samples that were made of them."""

from __future__ import annotations

import pytest

from benchmarks.profile import fits
from benchmarks.profile.drafter_peer import DraftSeen, num_right
from benchmarks.profile.fits import ShapeTimes, shape_times
from benchmarks.profile.suite import ProfilePlan
from benchmarks.profile.verifier_peer import Known, PassSeen, Shape
from coppice.tree import TokenTree, chain
from simulator.machine import Curve, PassWork, VerifierCosts

COSTS = VerifierCosts(
    Curve((4, 16, 64, 256, 1024), (0.005, 0.008, 0.015, 0.05, 0.2)),
    context=256,
    row_context_s=3e-7,
    sequence_s=0.00004,
    gap_token_s=0.00002,
    row_multiple=4,
)


def made_times(shape: Shape) -> ShapeTimes:
    pass_s = COSTS.pass_s(PassWork(shape.batch, shape.rows, 0, shape.rows * shape.context))
    return ShapeTimes(shape, pass_s, COSTS.after_s(shape.batch, shape.batch * shape.step), 10)


def test_costs_of_passes_are_found_again() -> None:
    times = [made_times(shape) for shape in ProfilePlan().shapes()]
    fit = fits.fit_passes(times, 256, row_multiple=4)
    assert fit.sequence_s == pytest.approx(COSTS.sequence_s, rel=1e-6)
    assert fit.row_context_s == pytest.approx(COSTS.row_context_s, rel=1e-6)
    for rows in (4, 16, 64, 128, 256, 1024):
        assert fit.passes.at(rows) == pytest.approx(COSTS.passes.at(rows), rel=1e-6)
    assert fits.fit_committed(times) == pytest.approx(COSTS.gap_token_s, rel=1e-6)


def test_gaps_are_a_line_that_is_nowhere_negative() -> None:
    assert fits.line([1, 8, 32], [0.003, 0.010, 0.034]) == pytest.approx((0.002, 0.001))
    assert fits.line([1, 8], [0.004, 0.002]) == pytest.approx((0.003, 0.0))
    assert fits.line([2, 4], [0.001, 0.005]) == pytest.approx((0.0, 0.0011))


def test_times_of_a_shape_are_medians_and_the_gap_lies_before_a_pass() -> None:
    passes = [PassSeen(came_s, 4, pass_s, 1) for came_s, pass_s in ((0.0, 9.0), (1.5, 1.0), (3.0, 1.0), (9.0, 4.0))]
    times = shape_times(Shape(1, 0), passes)
    assert times is not None
    assert (times.pass_s, times.gap_s, times.num_passes) == (2.5, 0.5, 4)
    assert shape_times(Shape(1, 0), passes[:3]) is None


def test_prompts_and_noise() -> None:
    passes = [PassSeen(0.0, rows, 0.005 + rows * 0.0002, 1) for rows in (64, 160, 480)]
    assert fits.fit_prompts(passes, 0.005) == pytest.approx(0.0002)
    even = [PassSeen(0.0, 4, 0.01 * factor, 1) for factor in (0.9, 0.95, 1.0, 1.05, 1.1)]
    assert 0.05 < fits.fit_noise([even]) < 0.1


def made_draft(nodes: int, num_unread: int = 1) -> DraftSeen:
    draft_s = 0.002 + 0.0001 * nodes + 0.00003 * (num_unread - 1)
    return DraftSeen(chain(range(nodes)), num_unread, draft_s, draft_s + 0.001)


def test_costs_of_drafts_are_found_again() -> None:
    rounds = [made_draft(nodes) for nodes in (1, 3, 7, 15, 31) for _ in range(4)]
    costs = fits.fit_drafts(rounds, [made_draft(3, 200), made_draft(7, 240), made_draft(3, 300)])
    assert costs.read_token_s == pytest.approx(0.00003)
    for nodes in (1, 3, 7, 10, 15, 31):
        assert costs.draft_s(nodes, 1) == pytest.approx(0.002 + 0.0001 * nodes)


def test_drafts_of_a_known_output_are_all_right_or_all_wrong() -> None:
    known = Known((1, 2), (5, 6, 0, 8, 9))
    assert known.draft(1, Shape(1, 3, right=True)).token_ids == (6, 0, 8)
    for position in range(3):
        wrong = known.draft(position, Shape(1, 2))
        assert len(wrong) == 2
        assert num_right(wrong, known.said[position:]) == 0


def test_the_right_nodes_are_followed_from_the_root_down() -> None:
    tree = TokenTree((7, 8, 9, 8), (-1, 0, 0, -1), (-0.1,) * 4)
    assert [num_right(tree, said) for said in ((7, 9, 1), (8, 9), (1, 7), (), (7, 8))] == [2, 1, 0, 0, 2]
