"""The regression behind the cost model, against the same thing written down in full."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.planner.regression import AgeWeightedRegression, RobustRegression


def observations(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    features = np.column_stack([np.ones(count), rng.integers(1, 9, count), rng.integers(0, 60, count)])
    return features, features @ np.array([5.0, 0.3, 0.2]) + rng.normal(0, 0.5, count)


@pytest.mark.parametrize("count", [1, 2, 7, 300])
@pytest.mark.parametrize("decay", [1.0, 0.97])
def test_it_is_the_weighted_least_squares_fit_with_the_anchor_as_further_observations(count: int, decay: float) -> None:
    features, targets = observations(count, seed=count)
    anchor, anchor_weights = np.array([1.0, 2.0, 3.0]), np.array([0.0, 2.0, 0.5])
    regression = AgeWeightedRegression(3, decay, anchor_weights)
    for row, target in zip(features, targets, strict=True):
        regression.add(row, target)
    weights = decay ** np.arange(count)[::-1]
    strengths = anchor_weights * (weights[:, None] * features**2).sum(0) / weights.sum() + 1e-9
    rows = np.vstack([np.sqrt(weights)[:, None] * features, np.diag(np.sqrt(strengths))])
    values = np.concatenate([np.sqrt(weights) * targets, np.sqrt(strengths) * anchor])
    expected = np.linalg.lstsq(rows, values)[0]
    assert regression.solve(anchor) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_on_trees_of_one_feature_it_is_the_closed_form_that_propd_gives() -> None:
    rng = np.random.default_rng(4)
    sizes, decay = rng.integers(1, 64, 200), 0.98
    times = 5 + 0.2 * sizes + rng.normal(0, 1, 200)
    regression = AgeWeightedRegression(2, decay, [0.0, 0.0])
    for size, time in zip(sizes, times, strict=True):
        regression.add(np.array([1.0, size]), time)
    weight = decay ** np.arange(200)[::-1]
    s0, s1, s2 = weight.sum(), (weight * sizes).sum(), (weight * sizes**2).sum()
    y0, y1 = (weight * times).sum(), (weight * times * sizes).sum()
    slope = (s0 * y1 - s1 * y0) / (s0 * s2 - s1**2)
    assert regression.solve(np.zeros(2)) == pytest.approx([(y0 - slope * s1) / s0, slope], rel=1e-6)


def fitted(features: np.ndarray, targets: np.ndarray) -> RobustRegression:
    regression = RobustRegression(features.shape[1], recent=48, lasting=2000, normal_error=0.01)
    for index, (row, target) in enumerate(zip(features, targets, strict=True)):
        regression.add(row, target)
        if index % 4 == 3:
            regression.solve()
    return regression


@pytest.mark.parametrize("at", [30, 150, 299])
def test_a_pass_sixty_times_slower_moves_the_fit_by_little(at: int) -> None:
    features, targets = observations(300, seed=1)
    slow = targets.copy()
    slow[at] *= 60
    plain, robust = (fitted(features, values).solve() for values in (targets, slow))
    usual = np.array([1.0, 4.0, 30.0])
    assert robust @ usual == pytest.approx(plain @ usual, rel=0.05)


def test_a_lasting_change_is_followed_within_a_hundred_passes_also_when_times_hardly_varied() -> None:
    regression = RobustRegression(2, recent=48, lasting=2000, normal_error=0.01)
    for index in range(300):
        regression.add(np.array([1.0, index % 5]), 10.0)
        if index % 4 == 3:
            regression.solve()
    for index in range(100):
        regression.add(np.array([1.0, index % 5]), 20.0)
        if index % 4 == 3:
            regression.solve()
    assert regression.solve() @ np.array([1.0, 2.0]) > 16


def test_what_was_nothing_for_long_can_become_something() -> None:
    regression = RobustRegression(2, recent=48, lasting=2000, normal_error=0.5)
    for index in range(400):
        regression.add(np.array([1.0, index % 3]), 0.0 if index < 200 else 2.0)
        if index % 4 == 3:
            regression.solve()
    assert regression.solve() @ np.array([1.0, 1.0]) > 1.7


def test_what_does_not_vary_costs_nothing_until_it_does_and_then_keeps_its_cost() -> None:
    regression = RobustRegression(2, recent=48, lasting=2000, normal_error=0.01)
    for _ in range(50):
        regression.add(np.array([1.0, 1.0]), 9.0)
    assert regression.solve() == pytest.approx([9.0, 0.0], abs=1e-3)
    for asked in [0.0, 1.0] * 20:
        regression.add(np.array([1.0, asked]), 5.0 + 4.0 * asked)
        regression.solve()
    assert regression.solve()[1] == pytest.approx(4.0, abs=0.6)
    for _ in range(300):
        regression.add(np.array([1.0, 0.0]), 5.0)
    assert regression.solve()[1] == pytest.approx(4.0, abs=1.0)
