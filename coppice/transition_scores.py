"""What the token before adds to the scores of the next one: a transition as a draft's search uses it. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from coppice.half_tables import HalfArray, floats, halves
from coppice.likeliest_tokens import FloatArray

try:
    from coppice.half_products import scores_behind
except ImportError:

    def scores_behind(
        scores: FloatArray, rows: npt.NDArray[np.int64], before: FloatArray, behind: HalfArray, sigmas: FloatArray
    ) -> FloatArray:
        """Stands in for the compiled one."""
        return ((scores[rows] + before @ floats(behind)) / sigmas[:, None]).astype(np.float32)


class TransitionScores:
    """Scores of all tokens behind given ones: the score of a pair is the product of their rows of two tables."""

    def __init__(self, before: FloatArray, behind: FloatArray) -> None:
        """Tables [vocab, rank]."""
        self._before = before
        # Laid out as the product reads it.
        self._behind = halves(behind.T)

    @property
    def vocab_size(self) -> int:
        """Tokens that are known."""
        return len(self._before)

    def behind(
        self, token_ids: Sequence[int], scores: FloatArray, depths: Sequence[int], sigmas: FloatArray
    ) -> FloatArray:
        """Scores of all tokens behind some, in units of their sigmas [n, vocab].

        Args:
            token_ids: those before [n].
            scores: what is known of each depth without the token before [depths, vocab].
            depths: of the tokens behind [n].
            sigmas: by depth [depths].
        """
        places = list(depths)
        return scores_behind(
            scores, np.asarray(places, np.int64), self._before[list(token_ids)], self._behind, sigmas[places]
        )
