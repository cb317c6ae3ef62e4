"""Compiled exponentials are right, and the exact ones are the same bits everywhere."""

from __future__ import annotations

import numpy as np

from coppice.kernels.cpu.exponentials import exact_exponentials, exponentials

F = np.float32


def test_exponentials_are_right_to_six_digits() -> None:
    values = np.linspace(-86, 88, 20_001, dtype=np.float32)
    results = values.copy()
    exponentials(results)
    assert np.allclose(results, np.exp(values.astype(np.float64)), rtol=1e-6)
    hidden = np.array([-np.inf, -1e30], np.float32)
    exponentials(hidden)
    assert (hidden < 1e-37).all()


def test_exact_ones_are_right_to_six_digits_wherever_they_stand() -> None:
    values = np.linspace(-90, 2, 4001, dtype=F)
    results = values.copy()
    exact_exponentials(results, F(2))
    exact = np.exp(np.maximum(values.astype(np.float64) - 2, -87))
    assert np.allclose(results, exact, rtol=2e-6)
    hidden = np.array([-np.inf], F)
    exact_exponentials(hidden, F(0))
    assert hidden[0] < 1e-37
    for offset in (1, 5, 17):
        part = values[offset : offset + 100].copy()
        exact_exponentials(part, F(2))
        assert (part == results[offset : offset + 100]).all()
