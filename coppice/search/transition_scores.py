"""A transition: the token before adds to the scores of the next one, in a draft's search. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from coppice.kernels.cpu.half_tables import HalfArray, floats, halves
from coppice.search.likeliest_tokens import FloatArray

try:
    from coppice.kernels.cpu.half_products import scores_behind
except ImportError:

    def scores_behind(
        scores: FloatArray, rows: npt.NDArray[np.int64], before: FloatArray, behind: HalfArray, sigmas: FloatArray
    ) -> FloatArray:
        """Stands in for the compiled one."""
        return ((scores[rows] + before @ floats(behind)) / sigmas[:, None]).astype(np.float32)


# Rows of embeddings are not made larger without bound.
_SMALLEST = np.float32(1e-6)


class TransitionScores:
    """Scores of all tokens after given ones: the score of a pair is the product of their rows of two tables.

    `before` [vocab, rank] is the one, `behind_halves` [rank, vocab] the other in bfloat16.
    """

    def __init__(self, before: FloatArray, behind: FloatArray) -> None:
        """Tables [vocab, rank]."""
        self.before = before
        # Laid out as the product reads it.
        self.behind_halves = halves(behind.T)

    @classmethod
    def of_embeddings(
        cls, before: FloatArray, behind: FloatArray, embeddings: FloatArray, output_embeddings: FloatArray
    ) -> Self:
        """Tables from matrices [rank, hidden] that act on a model's own embeddings [vocab, hidden] of both tokens.

        With rows made equally large, those of the token before become silu(before . row), the others behind . row.

        Raises:
            ValueError: the matrices do not fit the embeddings, or each other.
        """
        sizes = [matrix.shape[1:] for matrix in (before, behind)]
        if sizes != [table.shape[1:] for table in (embeddings, output_embeddings)] or len(before) != len(behind):
            raise ValueError(
                f"transitions of shapes {before.shape} and {behind.shape} do not fit embeddings of "
                f"{embeddings.shape[1:]} and {output_embeddings.shape[1:]} numbers"
            )
        own = _even_rows(embeddings) @ before.T
        return cls(own / (1 + np.exp(-own)), _even_rows(output_embeddings) @ behind.T)

    @property
    def vocab_size(self) -> int:
        """Tokens that are known."""
        return len(self.before)

    def behind(
        self, token_ids: Sequence[int], scores: FloatArray, depths: Sequence[int], sigmas: FloatArray
    ) -> FloatArray:
        """Scores of all tokens after some, in units of their sigmas [n, vocab].

        Args:
            token_ids: those before [n].
            scores: what is known of each depth without the token before [depths, vocab].
            depths: of the tokens after [n].
            sigmas: by depth [depths].
        """
        places = list(depths)
        return scores_behind(
            scores, np.asarray(places, np.int64), self.before[list(token_ids)], self.behind_halves, sigmas[places]
        )


def _even_rows(table: FloatArray) -> FloatArray:
    sizes = np.sqrt(np.square(table).mean(-1, keepdims=True))
    rows: FloatArray = table / np.maximum(sizes, _SMALLEST)
    return rows
