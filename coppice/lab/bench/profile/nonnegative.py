"""Least squares with coefficients from 0 on: what takes time does not give any back."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

_SWEEPS = 5000
# Relative change of the coefficients below which they are found.
_ENOUGH = 1e-9


def nonnegative(features: Floats, values: Floats) -> Floats:
    """Coefficients [F] from 0 on that minimise |features [N, F] @ coefficients - values [N]|, one after another.

    A feature that is 0 throughout gets 0.
    """
    scales = np.linalg.norm(features, axis=0)
    scales[scales == 0] = 1.0
    scaled = features / scales
    gram, target = scaled.T @ scaled, scaled.T @ values
    found = np.zeros(features.shape[1])
    for _ in range(_SWEEPS):
        before = found.copy()
        for index in np.flatnonzero(np.diag(gram)):
            slope = target[index] - gram[index] @ found
            found[index] = max(0.0, found[index] + slope / gram[index, index])
        if np.abs(found - before).max(initial=0.0) <= _ENOUGH * np.abs(found).max(initial=0.0):
            break
    return np.asarray(found / scales)
