"""Largest scores of each row with log-probabilities, in one compiled pass per row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.kernels.cpu.compiler import compiled
from coppice.kernels.cpu.exponentials import exponentials

FloatArray = npt.NDArray[np.float32]
# Scores this many sigmas below the largest are negligible in a sum of exponentials.
_NEGLIGIBLE = 40.0


@compiled
def top_scores(
    scores: FloatArray, sigma: np.float32, limit: int
) -> tuple[npt.NDArray[np.int64], FloatArray, npt.NDArray[np.int64]]:
    """The `limit` largest scores of each row, as `likeliest_tokens.top_children` defines them.

    Args:
        scores: [rows, vocab]; -inf is never among the largest.
        sigma: scale of the softmax.
        limit: at most the size of the vocabulary.

    Returns:
        tokens [rows, limit] and log softmax(scores / sigma) [rows, limit], largest first, ties in order; the first
        `counts` [rows] entries of each row are valid.
    """
    rows, vocab_size = scores.shape
    tokens = np.zeros((rows, limit), np.int64)
    log_probs = np.zeros((rows, limit), np.float32)
    counts = np.zeros(rows, np.int64)
    best = np.empty(limit, np.float32)
    powers = np.empty(vocab_size, np.float32)
    for row in range(rows):
        count = 0
        lowest = np.float32(-np.inf)
        for token in range(vocab_size):
            score = scores[row, token]
            # False for -inf and NaN.
            if score > lowest:
                place = min(count, limit - 1)
                while place > 0 and best[place - 1] < score:
                    best[place] = best[place - 1]
                    tokens[row, place] = tokens[row, place - 1]
                    place -= 1
                best[place] = score
                tokens[row, place] = token
                count = min(count + 1, limit)
                if count == limit:
                    lowest = best[limit - 1]
        counts[row] = count
        if count == 0:
            continue
        floor = best[0] - np.float32(_NEGLIGIBLE) * sigma
        for token in range(vocab_size):
            score = scores[row, token]
            # NaN contributes nothing either.
            powers[token] = ((score if score > floor else floor) - best[0]) / sigma
        exponentials(powers)
        total = np.float32(0)
        for token in range(vocab_size):
            total += powers[token]
        for place in range(count):
            log_probs[row, place] = (best[place] - best[0]) / sigma - np.log(total)
    return tokens, log_probs, counts
