"""What the target's hidden states add to the inputs of a drafter's pass.

As in EAGLE (2401.15077) a committed token's input row gets a projection of its feature: the target's last hidden state
of the row that the token was drawn from. As in Medusa (2401.10774) and Hydra (2402.05109) each mask gets one of the
latest feature, by its place. Where there is no feature nothing is added.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coppice.errors import InvalidRequestError

FloatArray = npt.NDArray[np.float32]

_BYTES = 2
# Rows are not made larger without bound.
_SMALLEST = 1e-6


@dataclass(frozen=True, slots=True)
class FeatureInputs:
    """The learned matrices: `token` [hidden, width], `down` [rank, width] and, by a mask's place, `up` [P, hidden, rank].

    With rows made equally large, a token gets token . feature and a mask up . silu(down . feature).

    Raises:
        ValueError: the matrices do not fit each other, or hold something that is no number.
    """

    token: FloatArray
    down: FloatArray
    up: FloatArray

    def __post_init__(self) -> None:
        shapes = self.token.shape, self.down.shape, self.up.shape
        if [len(shape) for shape in shapes] != [2, 2, 3]:
            raise ValueError(f"feature matrices of shapes {shapes}")
        (hidden, width), (rank, from_width), (_, to_hidden, to_rank) = shapes
        if (from_width, to_hidden, to_rank) != (width, hidden, rank):
            raise ValueError(f"feature matrices of shapes {shapes} do not fit each other")
        if not all(np.isfinite(matrix).all() for matrix in (self.token, self.down, self.up)):
            raise ValueError("feature matrices that are not all numbers")

    @property
    def width(self) -> int:
        """Numbers of a feature."""
        return self.token.shape[1]

    @property
    def hidden_size(self) -> int:
        """Numbers of an input row."""
        return self.token.shape[0]

    @property
    def num_masks(self) -> int:
        """Places that masks can have."""
        return self.up.shape[0]

    def to_tokens(self, rows: FloatArray) -> FloatArray:
        """What tokens get [n, hidden] for features [n, width] that `read_features` has read."""
        return rows @ self.token.T

    def to_masks(self, row: FloatArray) -> FloatArray:
        """What masks get [P, hidden] for the latest feature [width]."""
        own = row @ self.down.T
        return self.up @ (own / (1 + np.exp(-own)))


def read_features(features: bytes, width: int, num_tokens: int) -> FloatArray:
    """The features of the last of `num_tokens` tokens [n, width], each made as large as any other.

    One that holds something that is no number is none: it becomes zero, which adds nothing.

    Raises:
        InvalidRequestError: they are not of this width, or of more tokens than there are.
    """
    size = _BYTES * width
    if len(features) % size or len(features) > size * num_tokens:
        raise InvalidRequestError(
            "outcome.features", f"has {len(features)} bytes for {num_tokens} tokens of {size} bytes each"
        )
    halves = np.frombuffer(features, "<u2").astype(np.uint32)
    # The first half of a single-precision number; squares of the largest need double precision.
    rows = (halves << 16).view(np.float32).reshape(-1, width).astype(np.float64)
    rows[~np.isfinite(rows).all(-1)] = 0
    sizes = np.sqrt(np.square(rows).mean(-1, keepdims=True))
    return (rows / np.maximum(sizes, _SMALLEST)).astype(np.float32)
