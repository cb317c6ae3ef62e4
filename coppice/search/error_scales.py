"""Error scales of a draft's log-probabilities by temperature and depth, as checkpoints state them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

# Pairs of a temperature, coldest first, and the scales there, in nats, by depth.
ErrorScales: TypeAlias = tuple[tuple[float, tuple[float, ...]], ...]


def read_error_scales(content: Mapping[str, Any]) -> ErrorScales:
    """Scales from a JSON object of lists by temperature.

    Raises:
        ValueError, TypeError: it is none.
    """
    return tuple(sorted((float(key), tuple(map(float, scales))) for key, scales in content.items()))


def check_error_scales(sigmas: ErrorScales) -> None:
    """Raise ValueError for scales that mean nothing."""
    if not sigmas or len({len(scales) for _, scales in sigmas}) > 1:
        raise ValueError(f"sigmas must be as many at every temperature, got {sigmas}")
    if not all(scales and all(s > 0 and math.isfinite(s) for s in scales) for _, scales in sigmas):
        raise ValueError(f"sigmas must be finite numbers above 0, got {sigmas}")


@lru_cache(maxsize=256)
def error_scales_at(sigmas: ErrorScales, temperature: float, num_depths: int) -> npt.NDArray[np.float32]:
    """Scales [num_depths] at a temperature; where none was measured, those of the nearest depth or temperature.

    Kept for the next call, and not to be written to.
    """
    temperatures = [measured for measured, _ in sigmas]
    by_depth = np.asarray([scales for _, scales in sigmas])
    depths = np.minimum(np.arange(num_depths), by_depth.shape[1] - 1)
    scales = np.asarray([np.interp(temperature, temperatures, by_depth[:, depth]) for depth in depths], np.float32)
    scales.flags.writeable = False
    return scales
