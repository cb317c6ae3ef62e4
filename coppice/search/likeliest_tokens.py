"""Likeliest tokens per row of scores, as candidate children. No torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.kernels.cpu.top_scores import top_scores
from coppice.search.tree_limits import Children

FloatArray = npt.NDArray[np.float32]


def top_children(scores: FloatArray, sigma: np.float32, limit: int) -> list[Children]:
    """The `limit` largest scores of each row, largest first, with log softmax(scores / sigma); -inf is left out."""
    tokens, log_probs, counts = top_scores(scores, sigma, min(limit, scores.shape[-1]))
    return [
        Children(row_tokens[:count], row_log_probs[:count])
        for row_tokens, row_log_probs, count in zip(tokens.tolist(), log_probs.tolist(), counts.tolist(), strict=True)
    ]
