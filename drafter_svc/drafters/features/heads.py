"""Heads on the target's hidden state, whose outputs are added to the inputs of a block drafter's output layer.

As in Medusa (2401.10774) there is a head per position after the last committed token. Its inputs are the token's
feature (the target's last hidden state of the row that it was drawn from) and the token itself, as in EAGLE
(2401.15077). A head corrects the text-only prediction; without a feature nothing is added.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coppice.core.errors import InvalidRequestError
from coppice.kernels.cpu.half_tables import floats

FloatArray = npt.NDArray[np.float32]

BYTES_PER_NUMBER = 2
# Floor of row norms in their normalisation.
_SMALLEST = 1e-6


@dataclass(frozen=True, slots=True)
class FeatureHeads:
    """Learned matrices, and the drafter's embeddings [vocab, hidden].

    With rows normalised to RMS 1, a head computes up . (of_feature . feature + of_token . embedding). `of_feature` is
    [rank, width], `of_token` [rank, hidden], and `up` [P, hidden, rank] for P positions.

    Raises:
        ValueError: shapes do not match, or values are not finite.
    """

    of_feature: FloatArray
    of_token: FloatArray
    up: FloatArray
    embeddings: FloatArray

    def __post_init__(self) -> None:
        shapes = self.of_feature.shape, self.of_token.shape, self.up.shape, self.embeddings.shape
        if [len(shape) for shape in shapes] != [2, 2, 3, 2]:
            raise ValueError(f"feature heads of shapes {shapes}")
        (rank, _), (token_rank, hidden), (_, to_hidden, to_rank), (_, width) = shapes
        if not (rank == token_rank == to_rank and hidden == to_hidden == width):
            raise ValueError(f"feature heads of shapes {shapes} do not fit each other")
        if not all(np.isfinite(matrix).all() for matrix in (self.of_feature, self.of_token, self.up)):
            raise ValueError("feature heads that are not all numbers")

    @property
    def feature_size(self) -> int:
        """Numbers per feature."""
        return int(self.of_feature.shape[1])

    @property
    def num_places(self) -> int:
        """Predicted tokens."""
        return len(self.up)

    def say(self, feature: FloatArray, token_id: int) -> FloatArray:
        """Addition [P, hidden] after a token with its feature [width], as read by `last_feature`."""
        own = self.of_feature @ feature + self.of_token @ _even(self.embeddings[token_id])
        said: FloatArray = self.up @ own
        return said


def last_feature(features: bytes, size: int, num_tokens: int) -> FloatArray | None:
    """Last feature [size] among those of committed tokens, normalised; None if there is none.

    Features belong to the last tokens and may be fewer. One with a non-finite number is ignored.

    Raises:
        InvalidRequestError: they have another size, or are more than the tokens.
    """
    num_bytes = BYTES_PER_NUMBER * size
    if len(features) % num_bytes or len(features) > num_bytes * num_tokens:
        raise InvalidRequestError(
            "outcome.features", f"has {len(features)} bytes for {num_tokens} tokens of {num_bytes} bytes each"
        )
    row = floats(np.frombuffer(features[-num_bytes:], "<u2"))
    return _even(row) if row.any() and np.isfinite(row).all() else None


def _even(row: FloatArray) -> FloatArray:
    # Squares of large numbers need double precision.
    wide = row.astype(np.float64)
    even: FloatArray = (wide / max(np.sqrt(np.square(wide).mean()), _SMALLEST)).astype(np.float32)
    return even
