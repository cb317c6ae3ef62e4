"""RMS norms of any width are those by definition, and a row's bits are its own."""

from __future__ import annotations

import numpy as np
import pytest

from coppice.kernels.cpu.norms import rms_norm


@pytest.mark.parametrize("width", [8, 96, 100])
def test_it_is_the_norm_by_definition(width: int) -> None:
    generator = np.random.default_rng(width)
    rows = generator.standard_normal((5, width)).astype(np.float32)
    weight = generator.standard_normal(width).astype(np.float32)
    result = np.empty_like(rows)
    rms_norm(rows, weight, 1e-3, result)
    exact = rows.astype(np.float64)
    expected = weight * exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-3)
    assert np.abs(result - expected).max() < 1e-6
    alone = np.empty((1, width), np.float32)
    for index in range(5):
        rms_norm(rows[index : index + 1], weight, 1e-3, alone)
        assert (alone[0] == result[index]).all()
