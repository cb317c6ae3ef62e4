"""The exact distribution that a drafter samples a node's children from: few tokens, and nothing outside them.

What checks and passes trees on imports this module, and has no use for numpy: it starts threads when it is imported,
which services want to prepare for. So it is imported where it computes something.
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
    """Tokens and their weights; a token's probability is its share of the weights' sum, in float64.

    Whoever divides the same weights by their sum gets the same probabilities. So weights travel as they are, and
    a drafter that truncates its distribution samples from, and sends, the renormalised one by construction.

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
        """The token ids as an index into a row of the vocabulary."""
        import numpy as np

        return np.array(self.token_ids, np.int64)

    @cached_property
    def probabilities(self) -> FloatArray:
        """The probability of each token, in the order of `token_ids`."""
        import numpy as np

        weights = np.array(self.weights, np.float64)
        shares: FloatArray = weights / weights.sum()
        return shares

    def probability(self, token: int) -> float:
        """The probability of a token of the distribution."""
        return float(self.probabilities[self.token_ids.index(token)])

    def without(self, token: int) -> DraftDistribution:
        """What the next child is drawn from once `token` has been drawn and is not put back."""
        index = self.token_ids.index(token)
        return DraftDistribution(
            self.token_ids[:index] + self.token_ids[index + 1 :], self.weights[:index] + self.weights[index + 1 :]
        )


def truncated(
    logits: npt.NDArray[np.float32], temperature: float, max_tokens: int, min_tokens: int = 0
) -> DraftDistribution:
    """The `max_tokens` likeliest tokens of softmax(logits [vocab] / temperature), temperature above 0.

    Weights are float32, so that they cross the wire unchanged. Tokens whose weight vanishes are left out, save for the
    likeliest `min_tokens`, which keep the least weight that there is: who draws so many children always gets them.
    """
    import numpy as np

    top = np.argsort(-logits, kind="stable")[:max_tokens]
    peak = float(logits[top[0]])
    # Where nothing may be drawn, nothing is likelier than anything else.
    exponents = logits[top].astype(np.float64) - (peak if math.isfinite(peak) else 0.0)
    weights = np.exp(exponents / temperature).astype(np.float32)
    weights[:min_tokens] = np.maximum(weights[:min_tokens], np.finfo(np.float32).tiny)
    positive = weights > 0
    return DraftDistribution(tuple(top[positive].tolist()), tuple(weights[positive].tolist()))
