"""Likeliest tokens per row of scores, as candidate children; compiled if possible. No torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.search.tree_limits import Children

FloatArray = npt.NDArray[np.float32]

try:
    from coppice.kernels.cpu.top_scores import top_scores
except ImportError:

    def top_scores(
        scores: npt.NDArray[np.float32], sigma: np.float32, limit: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Fallback without the compiled function."""
        return library_top_scores(scores, sigma, limit)


def top_children(scores: FloatArray, sigma: np.float32, limit: int) -> list[Children]:
    """The `limit` largest scores of each row, largest first, with log softmax(scores / sigma); -inf is left out."""
    tokens, log_probs, counts = top_scores(scores, sigma, min(limit, scores.shape[-1]))
    return [
        Children(row_tokens[:count], row_log_probs[:count])
        for row_tokens, row_log_probs, count in zip(tokens.tolist(), log_probs.tolist(), counts.tolist(), strict=True)
    ]


def library_top_scores(
    scores: FloatArray, sigma: np.float32, limit: int
) -> tuple[npt.NDArray[np.int64], FloatArray, npt.NDArray[np.int64]]:
    """Reference for `top_scores.top_scores`, in numpy."""
    vocab_size = scores.shape[-1]
    # Sorted by token, so that ties keep that order.
    top = np.sort(np.argpartition(scores, vocab_size - limit, axis=-1)[:, vocab_size - limit :], axis=-1)
    values = np.take_along_axis(scores, top, -1)
    order = np.argsort(-values, axis=-1, kind="stable")
    values = np.take_along_axis(values, order, -1)
    tokens = np.take_along_axis(top, order, -1)
    peak = values[:, :1]
    # -inf minus -inf, in a row of -inf: no children.
    with np.errstate(invalid="ignore"):
        total = np.log(np.exp((scores - peak) / sigma).sum(-1, keepdims=True))
        log_probs: FloatArray = (values - peak) / sigma - total
    return tokens, log_probs, np.isfinite(log_probs).sum(-1)
