"""The definition of a drawn token in NumPy, one row after another: what the sampler's tokens are held to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from coppice.core.noise import gumbel
from coppice.core.sampling import SamplingParams

Scores = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
_NEVER = -np.inf


class NumpyChooser:
    """Chooses one sequence's tokens, in order; each choice becomes part of the history of the next."""

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        *,
        prompt: Iterable[int],
        output: Iterable[int] = (),
        end_token_ids: Iterable[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self.params = params
        self._vocab_size = vocab_size
        self._end_token_ids = list(end_token_ids)
        self._min_tokens = min_tokens
        self._num_output = 0
        self._seen = np.zeros(vocab_size if params.has_penalties else 0, np.bool_)
        self._counts = np.zeros(vocab_size if params.has_penalties else 0, np.int32)
        if params.has_penalties:
            self._seen[list(prompt)] = True
        for token in output:
            self.push(token)

    def choose(self, logits: Scores, position: int) -> int:
        """The token at an absolute position, from that row's raw logits [vocab]."""
        scores = self.processed(logits)
        if self.params.temperature == 0:
            return int(scores.argmax())
        return int((self.cut(self.tempered(scores)) + self.noise(position)).argmax())

    def law(self, logits: Scores, path: Sequence[int]) -> Doubles:
        """The law [vocab] of the choice after a path that follows the output; the path is pushed for good."""
        for token in path:
            self.push(token)
        scaled = self.cut(self.tempered(self.processed(logits)))
        weights = np.exp(scaled - scaled.max())
        law: Doubles = weights / weights.sum()
        return law

    def push(self, token: int) -> None:
        """Make a token part of the output's history."""
        self._num_output += 1
        if self.params.has_penalties:
            self._seen[token] = True
            self._counts[token] += 1

    def processed(self, logits: Scores) -> Scores:
        """Scores before temperature: penalties, bias, then what is forbidden."""
        params = self.params
        scores = logits.copy()
        if params.repetition_penalty != 1:
            seen, penalty = scores[self._seen], np.float32(params.repetition_penalty)
            scores[self._seen] = np.where(seen > 0, seen / penalty, seen * penalty)
        if params.presence_penalty or params.frequency_penalty:
            scores -= np.float32(params.presence_penalty) * (self._counts > 0)
            scores -= np.float32(params.frequency_penalty) * self._counts
        for token, bias in params.logit_bias.items():
            scores[token] += bias
        if params.allowed_token_ids:
            outside = np.ones(scores.size, np.bool_)
            outside[list(params.allowed_token_ids)] = False
            scores[outside] = _NEVER
        scores[list(params.bad_token_ids)] = _NEVER
        if self._num_output < self._min_tokens:
            scores[self._end_token_ids] = _NEVER
        return scores

    def tempered(self, scores: Scores) -> Doubles:
        """Scores over the temperature."""
        return scores.astype(np.float64) / self.params.temperature

    def cut(self, scaled: Doubles) -> Doubles:
        """The same, -inf where top_k, top_p or min_p cut, in this order; the likeliest token always stays."""
        params, scaled = self.params, scaled.copy()
        if 0 < params.top_k < scaled.size:
            kth = np.partition(scaled, -params.top_k)[-params.top_k]
            scaled[scaled < kth] = _NEVER
        if params.top_p < 1:
            order = np.argsort(-scaled, kind="stable")
            weights = np.exp(scaled[order] - scaled[order[0]])
            # A token stays while the likelier ones together have not reached top_p.
            before = np.cumsum(weights) - weights
            scaled[order[before >= params.top_p * weights.sum()]] = _NEVER
        if params.min_p > 0:
            scaled[scaled < scaled.max() + np.log(params.min_p)] = _NEVER
        return scaled

    def noise(self, position: int) -> Doubles:
        """The request's noise [vocab] at a position."""
        row: Doubles = gumbel(self.params.seed, position, 1, self._vocab_size)[0]
        return row
