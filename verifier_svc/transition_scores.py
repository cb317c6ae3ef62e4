"""What the token before adds to the scores of the next one: a transition as the draft's search uses it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coppice.likeliest_tokens import FloatArray
from verifier_svc.space_adapter import Transition

try:
    from verifier_svc.compiled_products import products
except ImportError:

    def products(left: FloatArray, right: FloatArray) -> FloatArray:
        """Stands in for the compiled one."""
        result: FloatArray = left @ right
        return result


class TransitionScores:
    """Scores of all tokens behind given ones."""

    def __init__(self, transition: Transition) -> None:
        self._before: FloatArray = transition.before.float().numpy()
        # Laid out as the product reads it.
        self._behind: FloatArray = np.ascontiguousarray(transition.behind.float().numpy().T)

    @property
    def vocab_size(self) -> int:
        """Tokens that are known."""
        return len(self._before)

    def behind(self, token_ids: Sequence[int]) -> FloatArray:
        """What is added to the scores of the tokens behind each of these [tokens, vocab]."""
        return products(self._before[list(token_ids)], self._behind)
