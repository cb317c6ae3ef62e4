"""Distribution that a drafter samples a node's children from: few tokens, exact by construction.

Modules that check and forward trees import this one, so numpy is imported on use: it starts threads when imported,
which services configure first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from coppice.core.errors import InvalidTreeError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float64]
    IndexArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DraftDistribution:
    """Tokens and weights; a token's probability is its weight divided by the sum, in float64.

    Weights are sent as they are, so all sides compute the same probabilities, and a truncated distribution is
    renormalised by construction.

    Raises:
        InvalidTreeError: no tokens, a token twice or below 0, or a weight that is not a finite number above 0.
    """

    token_ids: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.token_ids or len(self.token_ids) != len(self.weights):
            raise InvalidTreeError(f"a draft distribution of {len(self.token_ids)} tokens, {len(self.weights)} weights")
        if len(set(self.token_ids)) != len(self.token_ids) or min(self.token_ids) < 0:
            raise InvalidTreeError("a draft distribution names a token twice, or one below 0")
        if not (min(self.weights) > 0 and math.isfinite(sum(self.weights))):
            raise InvalidTreeError("a draft distribution has a weight that is not a finite number above 0")

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def tokens(self) -> IndexArray:
        """Token ids as an index into a vocabulary row."""
        import numpy as np

        return np.array(self.token_ids, np.int64)

    @cached_property
    def probabilities(self) -> FloatArray:
        """Probability of each token, in the order of `token_ids`."""
        import numpy as np

        weights = np.array(self.weights, np.float64)
        shares: FloatArray = weights / weights.sum()
        return shares

    def probability(self, token: int) -> float:
        """Probability of one of its tokens."""
        return float(self.probabilities[self.token_ids.index(token)])

    def without(self, token: int) -> DraftDistribution:
        """Distribution of the next draw without replacement, after `token` was drawn."""
        index = self.token_ids.index(token)
        return DraftDistribution(
            self.token_ids[:index] + self.token_ids[index + 1 :], self.weights[:index] + self.weights[index + 1 :]
        )


def truncated(
    logits: npt.NDArray[np.float32], temperature: float, max_tokens: int, min_tokens: int = 0
) -> DraftDistribution:
    """The `max_tokens` likeliest tokens of softmax(logits [vocab] / temperature), temperature above 0.

    Weights are float32, so they cross the wire unchanged. Tokens of weight 0 are dropped, except for the likeliest
    `min_tokens`, which get the smallest normal weight, so that this many children can always be drawn.
    """
    import numpy as np

    top = np.argsort(-logits, kind="stable")[:max_tokens]
    peak = float(logits[top[0]])
    # If all logits are -inf, all tokens are equally likely.
    exponents = logits[top].astype(np.float64) - (peak if math.isfinite(peak) else 0.0)
    weights = np.exp(exponents / temperature).astype(np.float32)
    weights[:min_tokens] = np.maximum(weights[:min_tokens], np.finfo(np.float32).tiny)
    positive = weights > 0
    return DraftDistribution(tuple(top[positive].tolist()), tuple(weights[positive].tolist()))
