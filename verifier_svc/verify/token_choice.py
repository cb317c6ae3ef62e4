"""Drawing the target's own next token from a row of logits: processors, temperature, then the request's noise.

`argmax(logits / T + G(seed, position, token))` is a draw from the softmax (Gumbel-max), and a function of the row,
the parameters and the position alone: the same with speculation on, off, pruned or resumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from coppice.core.errors import InvalidRequestError
from coppice.core.noise import NoiseStream
from coppice.core.sampling import SamplingParams
from verifier_svc.verify.cut_edges import has_cuts, is_near_tie

Logits = npt.NDArray[np.float32]
Mask: TypeAlias = npt.NDArray[np.bool_]
Law: TypeAlias = npt.NDArray[np.float64]
_NEVER = -np.inf


class Constraint(Protocol):
    """What an output's own form allows to come next."""

    @property
    def allowed(self) -> Mask:
        """The tokens that may come next [vocab]."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow the output so far."""

    def push(self, token: int) -> None:
        """Take the next token."""


class TokenChooser:
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
        near_tie_gap: float = 0.0,
    ) -> None:
        """Choices that logits could change which are off by less than half of `near_tie_gap` are counted; 0: none."""
        self._params = params
        self._noise = NoiseStream(params.seed, vocab_size) if params.temperature > 0 else None
        self._end_token_ids = list(end_token_ids)
        self._min_tokens = min_tokens
        self._num_output = 0
        self._near_tie_gap = near_tie_gap
        self._num_near_ties = 0
        # Set before the first choice, for requests with a grammar.
        self.constraint: Constraint | None = None
        self._track = params.has_penalties
        self._seen = np.zeros(vocab_size if self._track else 0, np.bool_)
        self._counts = np.zeros(vocab_size if self._track else 0, np.int32)
        self._allowed = _mask_outside(params.allowed_token_ids, vocab_size)
        if self._track:
            self._seen[list(prompt)] = True
        for token in output:
            self.push(token)

    def choose(self, logits: Logits, position: int) -> int:
        """The token at an absolute position, from that row's raw logits [vocab].

        Raises:
            InvalidRequestError: the grammar and the other parameters together leave no token.
        """
        scores = self._processed(logits)
        if self._noise is None:
            best = int(scores.argmax())
            if self._near_tie_gap:
                self._num_near_ties += _gap(scores, best) < self._near_tie_gap
            return best
        scaled = self._scaled(scores)
        scaled += self._noise.at(position)
        best = int(scaled.argmax())
        if self._near_tie_gap:
            self._num_near_ties += self._is_near_tie(scores, scaled, best, position)
        return best

    def take_near_ties(self) -> int:
        """Choices since the last call that were near-ties.

        Their two best scores, as logits, were less than the near-tie gap apart; or one of the two is so near the edge
        of a cut by top_k, top_p or min_p that rounding decides on which side it is.
        """
        taken, self._num_near_ties = self._num_near_ties, 0
        return taken

    def law(self, logits: Logits, path: Sequence[int]) -> Law:
        """The law [vocab] that `choose` would draw from once `path` had followed the output, from the row behind it.

        For temperatures above 0 and outputs without a grammar.
        """
        kept = self._num_output, self._seen, self._counts
        if self._track:
            self._seen, self._counts = self._seen.copy(), self._counts.copy()
        for token in path:
            self.push(token)
        scaled = self._scaled(self._processed(logits))
        self._num_output, self._seen, self._counts = kept
        if scaled.max() == _NEVER:
            # The parameters forbid every token; `choose` says token 0 then.
            scaled[0] = 0.0
        weights = np.exp(scaled - scaled.max())
        law: Law = weights / weights.sum()
        return law

    def prepare(self, position: int) -> None:
        """Compute the noise from this position on, ahead of the pass that needs it."""
        if self._noise is not None:
            self._noise.prepare(position)

    def guess_scores(self, logits: Logits, position: int) -> Logits:
        """Scores [rows, vocab] of guesses for consecutive positions from `position` on, made from the rows of `logits`.

        They are what `choose` would take the best of, in units of logits; the output's form is left out, which says
        nothing of tokens further on.
        """
        kept, self.constraint = self.constraint, None
        scores = np.empty_like(logits)
        for offset, row in enumerate(logits):
            if self._noise is None:
                scores[offset] = self._processed(row)
            else:
                noisy = self._scaled(self._processed(row)) + self._noise.at(position + offset)
                scores[offset] = noisy * self._params.temperature
        self.constraint = kept
        return scores

    def push(self, token: int) -> None:
        """Make a token part of the output's history."""
        self._num_output += 1
        if self._track:
            self._seen[token] = True
            self._counts[token] += 1
        if self.constraint is not None:
            self.constraint.push(token)

    def _processed(self, logits: Logits) -> Logits:
        params = self._params
        suppress_end = self._num_output < self._min_tokens and self._end_token_ids
        if not (self._track or params.logit_bias or params.bad_token_ids or suppress_end or self.constraint) and (
            self._allowed is None
        ):
            return logits
        scores = logits.copy()
        if self._track:
            self._penalise(scores)
        for token, bias in params.logit_bias.items():
            scores[token] += bias
        if self._allowed is not None:
            scores[self._allowed] = _NEVER
        if params.bad_token_ids:
            scores[list(params.bad_token_ids)] = _NEVER
        if self.constraint is not None:
            scores[~self.constraint.allowed] = _NEVER
        if suppress_end:
            scores[self._end_token_ids] = _NEVER
        if self.constraint is not None and scores.max() == _NEVER:
            raise InvalidRequestError(
                "sampling.grammar",
                f"with the other parameters, no token may follow {self._num_output} tokens of output",
            )
        return scores

    def _penalise(self, scores: Logits) -> None:
        params = self._params
        if params.repetition_penalty != 1:
            seen = scores[self._seen]
            penalty = np.float32(params.repetition_penalty)
            scores[self._seen] = np.where(seen > 0, seen / penalty, seen * penalty)
        if params.presence_penalty or params.frequency_penalty:
            scores -= np.float32(params.presence_penalty) * (self._counts > 0)
            scores -= np.float32(params.frequency_penalty) * self._counts

    def _scaled(self, scores: Logits) -> npt.NDArray[np.float64]:
        scaled = self._tempered(scores)
        self._truncate(scaled)
        return scaled

    def _tempered(self, scores: Logits) -> npt.NDArray[np.float64]:
        tempered = scores.astype(np.float64)
        # To divide by 1 changes no bit, and costs a pass over the vocabulary.
        if self._params.temperature != 1:
            tempered /= self._params.temperature
        return tempered

    def _is_near_tie(self, scores: Logits, noisy: npt.NDArray[np.float64], best: int, position: int) -> bool:
        assert self._noise is not None
        # What a rounding of logits is divided by, too.
        slack = self._near_tie_gap / self._params.temperature
        if not has_cuts(self._params, scores.size):
            return _gap(noisy, best) < slack
        return is_near_tie(self._params, self._tempered(scores), self._noise.at(position), best, slack)

    def _truncate(self, scaled: npt.NDArray[np.float64]) -> None:
        """Apply top_k, top_p and min_p in place, in this order; the likeliest token always stays."""
        params = self._params
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


def _gap(scores: npt.NDArray[np.floating[Any]], best: int) -> float:
    """How far the second best score is behind the best; infinite where there is no other."""
    second = max(scores[:best].max(initial=_NEVER), scores[best + 1 :].max(initial=_NEVER))
    return float(scores[best]) - float(second)


def _mask_outside(allowed: tuple[int, ...], vocab_size: int) -> Mask | None:
    if not allowed:
        return None
    outside = np.ones(vocab_size, np.bool_)
    outside[list(allowed)] = False
    return outside
