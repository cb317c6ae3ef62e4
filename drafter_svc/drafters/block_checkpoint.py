"""What `drafter.json` says about a checkpoint that predicts a block of tokens in one pass."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coppice.errors import IncompatibleError
from drafter_svc.drafters.checkpoint import CALIBRATION_FILE

FloatArray = npt.NDArray[np.float32]
# More tokens than any target pays for in one round.
MAX_BLOCK = 64


@dataclass(frozen=True, slots=True)
class BlockCalibration:
    """What was measured about a checkpoint, and which of its embeddings are masks.

    Masks are the last `num_masks` ids of its vocabulary, which no tokenizer gives. A block has `block` tokens. `sigmas`
    are pairs of a temperature, coldest first, and the scales of the log-probability errors there, in nats, by depth.
    """

    num_masks: int
    block: int
    sigmas: tuple[tuple[float, tuple[float, ...]], ...]
    acceptance_by_rank: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.num_masks < MAX_BLOCK:
            raise ValueError(f"num_masks must be in 1..{MAX_BLOCK - 1}, got {self.num_masks}")
        if not 1 <= self.block <= MAX_BLOCK:
            raise ValueError(f"block must be in 1..{MAX_BLOCK}, got {self.block}")
        if not self.sigmas or len({len(scales) for _, scales in self.sigmas}) > 1:
            raise ValueError(f"sigmas must be as many at every temperature, got {self.sigmas}")
        if not all(scales and all(s > 0 and math.isfinite(s) for s in scales) for _, scales in self.sigmas):
            raise ValueError(f"sigmas must be finite numbers above 0, got {self.sigmas}")

    def sigmas_at(self, temperature: float, num_depths: int) -> FloatArray:
        """Sigmas [num_depths] at a temperature; where none was measured, those of the nearest depth or temperature."""
        temperatures = [measured for measured, _ in self.sigmas]
        by_depth = np.asarray([scales for _, scales in self.sigmas])
        depths = np.minimum(np.arange(num_depths), by_depth.shape[1] - 1)
        return np.asarray([np.interp(temperature, temperatures, by_depth[:, depth]) for depth in depths], np.float32)


def load_block_calibration(reference: str, kind: str) -> BlockCalibration:
    """What the checkpoint's `drafter.json` says.

    Raises:
        IncompatibleError: there is none, or it is not what this kind of drafter needs.
    """
    path = Path(reference) / CALIBRATION_FILE
    if not path.is_file():
        raise IncompatibleError(f"{reference} has no {CALIBRATION_FILE}, which says what its masks are")
    try:
        content = json.loads(path.read_text())
        if (found := content.get("kind")) != kind:
            raise IncompatibleError(f"{path} is that of a drafter of the kind {found!r}, not {kind!r}")
        return _calibration(content)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise IncompatibleError(f"{path}: {error!r}") from error


def _calibration(content: dict[str, Any]) -> BlockCalibration:
    sigmas = sorted((float(key), tuple(map(float, scales))) for key, scales in content["sigmas"].items())
    shares = tuple(map(float, content.get("acceptance_by_rank", ())))
    return BlockCalibration(int(content["num_masks"]), int(content["block"]), tuple(sigmas), shares)
