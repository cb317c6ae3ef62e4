"""Drawing the target's own next token from a row of logits: processors, temperature, then the request's noise.

`argmax(logits / T + G(seed, position, token))` is a draw from the softmax (Gumbel-max), and a function of the row,
the parameters and the position alone: the same with speculation on, off, pruned or resumed. `sampler` draws for all
rows of a pass; here is what it has to know of a sequence.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from coppice.core.errors import InvalidRequestError
from coppice.core.noise import gumbel
from coppice.core.sampling import SamplingParams
from coppice.core.tree import EMPTY_TREE
from verifier_svc.kernels.cpu.token_draws import NOTHING_ALLOWED
from verifier_svc.verify.sampler import NO_MASK, Logits, Mask, RowTable

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
        self.params = params
        self.min_tokens = min_tokens
        self.near_tie_gap = near_tie_gap
        self.num_output = 0
        self.num_near_ties = 0
        # Set before the first choice, for requests with a grammar.
        self.constraint: Constraint | None = None
        # Tokens of the prompt and the output, each once, and how often the output has them; where penalties are.
        self.history, self.counts = array("q"), array("d")
        self._places: dict[int, int] = {}
        # Bias, allowed and bad tokens, and those that end the output, each with its values.
        self.lists = tuple(
            (np.array(tuple(tokens), np.int64), np.array(tuple(values), np.float64))
            for tokens, values in (
                (params.logit_bias, params.logit_bias.values()),
                *(
                    (ids, [0.0] * len(ids))
                    for ids in (params.allowed_token_ids, params.bad_token_ids, [*end_token_ids])
                ),
            )
        )
        # Columns of `token_draws`. The seed is a signed number of the same bits.
        self.whole = params.seed - ((params.seed >> 63) << 64), params.top_k
        self.real = (
            params.temperature,
            params.top_p,
            float(np.log(params.min_p)) if params.min_p > 0 else _NEVER,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            near_tie_gap,
        )
        self._vocab_size = vocab_size
        if params.has_penalties:
            for token in prompt:
                self._meet(token)
        for token in output:
            self.push(token)

    def choose(self, logits: Logits, position: int) -> int:
        """The token at an absolute position, from that row's raw logits [vocab].

        Raises:
            InvalidRequestError: the grammar and the other parameters together leave no token.
        """
        mask = NO_MASK if self.constraint is None else self.constraint.allowed
        table = RowTable()
        table.add(self, EMPTY_TREE, 0, position)
        token, is_near_tie = table.draw_one(logits, mask)
        if token == NOTHING_ALLOWED:
            if self.constraint is not None:
                raise InvalidRequestError(
                    "sampling.grammar",
                    f"with the other parameters, no token may follow {self.num_output} tokens of output",
                )
            token = 0
        self.num_near_ties += is_near_tie
        return token

    def choose_exactly(self, scores: Logits, position: int) -> int:
        """The token from a row of scores [vocab], where sums in double precision say which ones `top_p` keeps."""
        return int((self._scaled(scores) + self._noise(position)).argmax())

    def take_near_ties(self) -> int:
        """Choices since the last call that were near-ties.

        Their two best scores, as logits, were less than the near-tie gap apart; or one of the two is so near the edge
        of a cut by top_k, top_p or min_p that rounding decides on which side it is.
        """
        taken, self.num_near_ties = self.num_near_ties, 0
        return taken

    def law(self, logits: Logits, path: Sequence[int]) -> Law:
        """The law [vocab] that `choose` would draw from once `path` had followed the output, from the row behind it.

        For temperatures above 0 and outputs without a grammar.
        """
        scaled = self._scaled(self._processed(logits, path))
        if scaled.max() == _NEVER:
            # The parameters forbid every token; `choose` says token 0 then.
            scaled[0] = 0.0
        weights = np.exp(scaled - scaled.max())
        law: Law = weights / weights.sum()
        return law

    def guess_scores(self, logits: Logits, position: int) -> Logits:
        """Scores [rows, vocab] of guesses for consecutive positions from `position` on, made from the rows of `logits`.

        They are what `choose` would take the best of, in units of logits; the output's form is left out, which says
        nothing of tokens further on.
        """
        scores = np.empty_like(logits)
        for offset, row in enumerate(logits):
            processed, temperature = self._processed(row), self.params.temperature
            scores[offset] = processed
            if temperature > 0:
                scores[offset] = (self._scaled(processed) + self._noise(position + offset)) * temperature
        return scores

    def push(self, token: int) -> None:
        """Make a token part of the output's history."""
        self.num_output += 1
        if self.params.has_penalties:
            self.counts[self._meet(token)] += 1
        if self.constraint is not None:
            self.constraint.push(token)

    def count(self, token: int) -> float:
        """How often the output has a token; known where penalties are."""
        place = self._places.get(token)
        return 0.0 if place is None else self.counts[place]

    def _meet(self, token: int) -> int:
        """A token's place in the history, from now on."""
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self.history)
            self.history.append(token)
            self.counts.append(0.0)
        return place

    def _noise(self, position: int) -> Law:
        row: Law = gumbel(self.params.seed, position, 1, self._vocab_size)[0]
        return row

    def _processed(self, logits: Logits, path: Sequence[int] = ()) -> Logits:
        """Scores after `path`, before temperature and cuts."""
        table = RowTable()
        table.add_after(self, path)
        return table.edited(logits, NO_MASK)

    def _scaled(self, scores: Logits) -> Law:
        """Scores over the temperature; those of tokens that are cut off by top_k, top_p and min_p are -inf.

        They are applied in this order, and the likeliest token always stays.
        """
        params = self.params
        scaled = scores.astype(np.float64) / params.temperature
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


def warm_up(vocab_size: int) -> None:
    """Draw a token, so that no request waits until what that calls is compiled."""
    chooser = TokenChooser(SamplingParams(temperature=1.0, repetition_penalty=1.1), vocab_size, prompt=(0,))
    rows = np.zeros((1, vocab_size), np.float32)
    chooser.choose(rows[0], 0)
    chooser.guess_scores(rows, 0)
