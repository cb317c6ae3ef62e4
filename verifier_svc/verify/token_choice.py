"""Choice of the target's own next token from a row of logits: processors, temperature, then the request's noise.

`argmax(logits / T + G(seed, position, token))` is a draw from the softmax (Gumbel-max), and a function of the row,
the parameters and the position alone: the same with speculation on, off, pruned or resumed. `sampler` draws for all
rows of a pass; this module holds a sequence's parameters and history.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from coppice.core.errors import InvalidRequestError
from coppice.core.noise import gumbel
from coppice.core.sampling import SamplingParams
from coppice.core.tree import EMPTY_TREE
from verifier_svc.kernels.cpu.token_draws import NOTHING_ALLOWED
from verifier_svc.verify.sampler import NO_MASK, IntArray, Logits, Mask, RowTable

Law: TypeAlias = npt.NDArray[np.float64]
_NEVER = -np.inf


class Constraint(Protocol):
    """Allowed next tokens of an output with a grammar."""

    @property
    def allowed(self) -> Mask:
        """Allowed next tokens [vocab]."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow the output."""

    def push(self, token: int) -> None:
        """Advance by a token."""


class TokenChooser:
    """Chooses one sequence's tokens, in order; each choice enters the history of the next."""

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
        """Counts choices that errors of logits below half of `near_tie_gap` could change; 0 counts none."""
        self.params = params
        self.min_tokens = min_tokens
        self.near_tie_gap = near_tie_gap
        self.num_output = 0
        self.num_near_ties = 0
        # Set before the first choice of requests with a grammar.
        self.constraint: Constraint | None = None
        # Distinct tokens of prompt and output in order, and their counts in the output; only with penalties.
        self.history: IntArray = np.unique(np.array(tuple(prompt) if params.has_penalties else (), np.int64))
        self.counts: Law = np.zeros(len(self.history))
        # Bias, allowed, bad and end tokens, each with values.
        self.lists: tuple[tuple[IntArray, Law], ...] = tuple(
            (np.array(tuple(tokens), np.int64), np.array(tuple(values), np.float64))
            for tokens, values in (
                (params.logit_bias, params.logit_bias.values()),
                *(
                    (ids, [0.0] * len(ids))
                    for ids in (params.allowed_token_ids, params.bad_token_ids, [*end_token_ids])
                ),
            )
        )
        # Columns of `token_draws`. The seed as a signed number of the same bits.
        self.whole = params.seed - ((params.seed >> 63) << 64), params.top_k
        self.real: tuple[float, ...] = (
            params.temperature,
            params.top_p,
            float(np.log(params.min_p)) if params.min_p > 0 else _NEVER,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            near_tie_gap,
        )
        self._vocab_size = vocab_size
        for token in output:
            self.push(token)

    def choose(self, logits: Logits, position: int) -> int:
        """Token at an absolute position, from the row's raw logits [vocab].

        Raises:
            InvalidRequestError: the grammar and the other parameters together allow no token.
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
        """Token from a row of scores [vocab], with `top_p` evaluated by sums in double precision."""
        return int((self._scaled(scores) + self._noise(position)).argmax())

    def take_near_ties(self) -> int:
        """Number of near-ties since the last call.

        Choices whose two best scores, as logits, differed by less than the near-tie gap; or where one of the two is so
        close to a cut by top_k, top_p or min_p that rounding decides its side.
        """
        taken, self.num_near_ties = self.num_near_ties, 0
        return taken

    def law(self, logits: Logits, path: Sequence[int]) -> Law:
        """Distribution [vocab] that `choose` would draw from once `path` followed the output, from the row after it.

        For temperatures above 0 and outputs without a grammar.
        """
        scaled = self._scaled(self._processed(logits, path))
        if scaled.max() == _NEVER:
            # The parameters forbid every token; `choose` returns token 0.
            scaled[0] = 0.0
        weights = np.exp(scaled - scaled.max())
        law: Law = weights / weights.sum()
        return law

    def guess_scores(self, logits: Logits, position: int) -> Logits:
        """Scores [rows, vocab] of guesses for consecutive positions from `position` on, from the rows of `logits`.

        `choose` would take their maximum, in units of logits; grammars are ignored, since they do not bound later
        tokens.
        """
        scores = np.empty_like(logits)
        for offset, row in enumerate(logits):
            processed, temperature = self._processed(row), self.params.temperature
            scores[offset] = processed
            if temperature > 0:
                scores[offset] = (self._scaled(processed) + self._noise(position + offset)) * temperature
        return scores

    def push(self, token: int) -> None:
        """Add a token to the output's history."""
        self.num_output += 1
        if self.params.has_penalties:
            place = int(self.history.searchsorted(token))
            if self.count(token) is None:
                self.history = np.insert(self.history, place, token)
                self.counts = np.insert(self.counts, place, 0.0)
            self.counts[place] += 1
        if self.constraint is not None:
            self.constraint.push(token)

    def count(self, token: int) -> float | None:
        """Count of a token in the output, None for one that never came; known with penalties only."""
        place = self.history.searchsorted(token)
        return float(self.counts[place]) if place < len(self.history) and self.history[place] == token else None

    def _noise(self, position: int) -> Law:
        row: Law = gumbel(self.params.seed, position, 1, self._vocab_size)[0]
        return row

    def _processed(self, logits: Logits, path: Sequence[int] = ()) -> Logits:
        """Scores after `path`, before temperature and cuts."""
        table = RowTable()
        table.add_after(self, path)
        return table.edited(logits, NO_MASK)

    def _scaled(self, scores: Logits) -> Law:
        """Scores over the temperature; -inf for tokens cut off by top_k, top_p and min_p.

        Applied in this order; the likeliest token always stays.
        """
        params = self.params
        scaled = scores.astype(np.float64) / params.temperature
        if 0 < params.top_k < scaled.size:
            kth = np.partition(scaled, -params.top_k)[-params.top_k]
            scaled[scaled < kth] = _NEVER
        if params.top_p < 1:
            order = np.argsort(-scaled, kind="stable")
            weights = np.exp(scaled[order] - scaled[order[0]])
            # A token stays while the likelier ones sum to less than top_p.
            before = np.cumsum(weights) - weights
            scaled[order[before >= params.top_p * weights.sum()]] = _NEVER
        if params.min_p > 0:
            scaled[scaled < scaled.max() + np.log(params.min_p)] = _NEVER
        return scaled


def warm_up(vocab_size: int) -> None:
    """Draw a token, so that no request waits for compilation."""
    chooser = TokenChooser(SamplingParams(temperature=1.0, repetition_penalty=1.1), vocab_size, prompt=(0,))
    rows = np.zeros((1, vocab_size), np.float32)
    chooser.choose(rows[0], 0)
    chooser.guess_scores(rows, 0)
