"""Error scales of a draft's log-probabilities by temperature and depth, from checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

# Pairs of a temperature, lowest first, and its scales by depth, in nats.
ErrorScales: TypeAlias = tuple[tuple[float, tuple[float, ...]], ...]


def read_error_scales(content: Mapping[str, Any]) -> ErrorScales:
    """Parse scales from a JSON object of lists by temperature.

    Raises:
        ValueError, TypeError: the object has another form.
    """
    return tuple(sorted((float(key), tuple(map(float, scales))) for key, scales in content.items()))


def check_error_scales(sigmas: ErrorScales) -> None:
    """Raise ValueError for invalid scales."""
    if not sigmas or len({len(scales) for _, scales in sigmas}) > 1:
        raise ValueError(f"sigmas must be as many at every temperature, got {sigmas}")
    if not all(scales and all(s > 0 and math.isfinite(s) for s in scales) for _, scales in sigmas):
        raise ValueError(f"sigmas must be finite numbers above 0, got {sigmas}")


@lru_cache(maxsize=256)
def error_scales_at(sigmas: ErrorScales, temperature: float, num_depths: int) -> npt.NDArray[np.float32]:
    """Scales [num_depths] at a temperature, interpolated; the nearest depth or temperature beyond the measured ones.

    Cached and read-only.
    """
    temperatures = [measured for measured, _ in sigmas]
    by_depth = np.asarray([scales for _, scales in sigmas])
    depths = np.minimum(np.arange(num_depths), by_depth.shape[1] - 1)
    scales = np.asarray([np.interp(temperature, temperatures, by_depth[:, depth]) for depth in depths], np.float32)
    scales.flags.writeable = False
    return scales
