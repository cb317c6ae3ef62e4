"""Transition: the previous token's contribution to the scores of the next, for a draft's search. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np

from coppice.kernels.cpu.half_products import scores_behind
from coppice.kernels.cpu.half_tables import halves
from coppice.search.likeliest_tokens import FloatArray

# Floor of row norms in their normalisation.
_SMALLEST = np.float32(1e-6)


class TransitionScores:
    """Scores of all tokens after given ones: the score of a pair is the product of their rows in two tables.

    `before` [vocab, rank] is float32, `behind_halves` [rank, vocab] bfloat16.
    """

    def __init__(self, before: FloatArray, behind: FloatArray) -> None:
        """Tables [vocab, rank]."""
        self.before = before
        # In the layout of the product.
        self.behind_halves = halves(behind.T)

    @classmethod
    def of_embeddings(
        cls, before: FloatArray, behind: FloatArray, embeddings: FloatArray, output_embeddings: FloatArray
    ) -> Self:
        """Tables from matrices [rank, hidden] that act on the model's input and output embeddings [vocab, hidden].

        With rows normalised to RMS 1, `before` has silu(before . row), and `behind` has behind . row.

        Raises:
            ValueError: shapes do not match.
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
        """Size of the vocabulary."""
        return len(self.before)

    def behind(
        self, token_ids: Sequence[int], scores: FloatArray, depths: Sequence[int], sigmas: FloatArray
    ) -> FloatArray:
        """Scores of all tokens after the given ones, in units of their sigmas [n, vocab].

        Args:
            token_ids: preceding tokens [n].
            scores: scores by depth, without the preceding token [depths, vocab].
            depths: depths of the following tokens [n].
            sigmas: scales by depth [depths].
        """
        places = list(depths)
        return scores_behind(
            scores, np.asarray(places, np.int64), self.before[list(token_ids)], self.behind_halves, sigmas[places]
        )


def _even_rows(table: FloatArray) -> FloatArray:
    sizes = np.sqrt(np.square(table).mean(-1, keepdims=True))
    rows: FloatArray = table / np.maximum(sizes, _SMALLEST)
    return rows
