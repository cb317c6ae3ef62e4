"""Feature-conditioned drafters over tiny targets, for tests that load or serve them."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from drafter_svc.drafters.features.checkpoint import save_matrices, trunk_reference
from drafter_svc.drafters.features.heads import FloatArray
from tests.tiny_blocks import BLOCK, block_calibration, write_tiny_block_drafter

KIND = "semi-ar-features"


def random_matrices(
    hidden: int, feature_size: int, num_places: int, seed: int = 0, scale: float = 1.0
) -> dict[str, FloatArray]:
    """Heads that know nothing, and make a difference."""
    rng = np.random.default_rng(seed)
    shapes = {"of_feature": (4, feature_size), "of_token": (4, hidden), "up": (num_places, hidden, 4)}
    return {name: rng.normal(0, scale, shape).astype(np.float32) for name, shape in shapes.items()}


def encode(rows: Sequence[Sequence[float]]) -> bytes:
    """Rows of numbers in bfloat16, cut off: by hand, each the first half of a single-precision number."""
    return b"".join(struct.pack("<f", value)[2:] for row in rows for value in row)


def write_tiny_feature_drafter(directory: Path, target: Path, feature_size: int, scale: float = 1.0) -> None:
    """A drafter whose trunk, beside it, predicts the next token as the target does; features lead it astray."""
    trunk, out = directory / "trunk", directory / "drafter"
    write_tiny_block_drafter(trunk, target, "semi-ar")
    hidden = int(json.loads((target / "config.json").read_text())["hidden_size"])
    save_matrices(random_matrices(hidden, feature_size, BLOCK, scale=scale), out)
    calibration = {**block_calibration(KIND, BLOCK - 1), "trunk": trunk_reference(trunk, out)}
    (out / "drafter.json").write_text(json.dumps(calibration))
