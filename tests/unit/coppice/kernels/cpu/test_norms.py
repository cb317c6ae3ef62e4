"""RMS norms are those by definition."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from coppice.kernels.cpu.norms import exact_rms_norm, rms_norm


@pytest.mark.parametrize(
    ("norm", "width"), [(rms_norm, 8), (rms_norm, 96), (exact_rms_norm, 96), (exact_rms_norm, 256)]
)
def test_they_are_norms_by_definition(norm: Callable[..., None], width: int) -> None:
    generator = np.random.default_rng(width)
    rows = generator.standard_normal((5, width)).astype(np.float32)
    weight = generator.standard_normal(width).astype(np.float32)
    result = np.empty_like(rows)
    norm(rows, weight, 1e-3, result)
    exact = rows.astype(np.float64)
    expected = weight * exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-3)
    assert np.abs(result - expected).max() < 1e-6
