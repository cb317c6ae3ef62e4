"""Contents of `drafter.json` for checkpoints that predict a block of tokens in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coppice.checkpoints.files import CALIBRATION_FILE, read_object
from coppice.core.denoising import MAX_BLOCK_TOKENS
from coppice.core.errors import IncompatibleError
from coppice.search.error_scales import ErrorScales, check_error_scales, error_scales_at, read_error_scales

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BlockCalibration:
    """Measurements of a checkpoint, and its masks.

    Masks are the last `num_masks` ids of the vocabulary, which no tokenizer produces. A block has `block` tokens.
    `sigmas` are the scales of log-probability errors. `context` is the number of tokens that it was trained for; 0 if
    unknown.
    """

    num_masks: int
    block: int
    sigmas: ErrorScales
    acceptance_by_rank: tuple[float, ...] = ()
    context: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_masks < MAX_BLOCK_TOKENS:
            raise ValueError(f"num_masks must be in 1..{MAX_BLOCK_TOKENS - 1}, got {self.num_masks}")
        if not 1 <= self.block <= MAX_BLOCK_TOKENS:
            raise ValueError(f"block must be in 1..{MAX_BLOCK_TOKENS}, got {self.block}")
        if self.context < 0:
            raise ValueError(f"context must be at least 0, got {self.context}")
        check_error_scales(self.sigmas)

    def sigmas_at(self, temperature: float, num_depths: int) -> FloatArray:
        """Sigmas [num_depths] at a temperature, interpolated; the nearest depth or temperature beyond the measured."""
        return error_scales_at(self.sigmas, temperature, num_depths)


def load_block_calibration(reference: str, kind: str) -> BlockCalibration:
    """Read the checkpoint's `drafter.json`.

    Raises:
        IncompatibleError: the file is missing or invalid for this kind of drafter.
    """
    path = Path(reference) / CALIBRATION_FILE
    if not path.is_file():
        raise IncompatibleError(f"{reference} has no {CALIBRATION_FILE}, which describes its masks")
    content = read_object(path)
    try:
        if (found := content.get("kind")) != kind:
            raise IncompatibleError(f"{path} is that of a drafter of the kind {found!r}, not {kind!r}")
        return _calibration(content)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise IncompatibleError(f"{path}: {error!r}") from error


def _calibration(content: dict[str, Any]) -> BlockCalibration:
    shares = tuple(map(float, content.get("acceptance_by_rank", ())))
    sigmas = read_error_scales(content["sigmas"])
    masks, block, context = int(content["num_masks"]), int(content["block"]), int(content.get("context", 0))
    return BlockCalibration(masks, block, sigmas, shares, context)
