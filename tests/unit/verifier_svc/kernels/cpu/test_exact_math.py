"""Every sum is taken in the order that is written down, to the last bit."""

from __future__ import annotations

import numpy as np

from verifier_svc.kernels.cpu.exact_math import LANES, exponentials, lane_max, lane_sum

F = np.float32


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Of very different sizes, so that another order gives other bits."""
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(shape) * 10.0 ** generator.uniform(-3, 3, shape)).astype(F)


def test_a_lane_sum_goes_by_lanes_and_then_by_halves() -> None:
    values = numbers(5 * LANES)
    lanes = np.zeros(LANES, F)
    for row in values.reshape(5, LANES):
        lanes = lanes + row
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    assert lane_sum(values) == lanes[0]
    assert lane_sum(np.concatenate([values, np.zeros(LANES, F)])) == lanes[0], "zeros behind the end change nothing"
    assert lane_max(values) == values.max()


def test_exponentials_are_right_to_six_digits_wherever_they_stand() -> None:
    values = np.linspace(-90, 2, 4001, dtype=F)
    results = values.copy()
    exponentials(results, F(2))
    exact = np.exp(np.maximum(values.astype(np.float64) - 2, -87))
    assert np.allclose(results, exact, rtol=2e-6)
    hidden = np.array([-np.inf], F)
    exponentials(hidden, F(0))
    assert hidden[0] < 1e-37
    for offset in (1, 5, 17):
        part = values[offset : offset + 100].copy()
        exponentials(part, F(2))
        assert (part == results[offset : offset + 100]).all()
