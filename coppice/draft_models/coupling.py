"""Likely draws of the target, given the drafter's logits and the request's noise. No torch.

    score_v        = logit_v + T * G(seed, position, v)
    P(v is right)  = softmax(score / sigma)_v

The target draws argmax(its logits / T + G), so the largest scores are the best guesses. The noise is known; what is
uncertain is the difference between the target's and the drafter's log-probabilities, whose scale `sigma` is calibrated
per checkpoint. At temperature 0 the noise vanishes and the same formula holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from coppice.core.noise import gumbel
from coppice.core.sampling import SamplingParams
from coppice.search.likeliest_tokens import top_children
from coppice.search.tree_limits import Children

FloatArray = npt.NDArray[np.float32]
# Tokens searched for the nucleus: sorting a whole vocabulary would cost more than it gains.
NUCLEUS_TOKENS = 256
_NEVER = np.float32(-np.inf)

# Writes noise [positions, tokens] from an absolute position on.
FillNoise: TypeAlias = Callable[[int, FloatArray], None]

# Drafted tokens that lead to each row, its own last.
Paths = Sequence[Sequence[int]]
UNKNOWN_PATHS: Paths = ()


# Least scale without noise, for temperatures close to 0.
_LEAST_SIGMA = 1e-3


@dataclass(frozen=True, slots=True)
class ChildChoice:
    """Choice of children: most per node, and whether the request's noise is used."""

    max_children: int = 16
    is_coupled: bool = True

    def sigma(self, temperature: float, calibrated: float) -> float:
        """Scale of uncertainty: without the noise, that of the target's draws."""
        return calibrated if self.is_coupled or temperature == 0 else max(temperature, _LEAST_SIGMA)


class Coupling:
    """Converts one request's logits to candidate children.

    Penalties consider committed tokens and, if a row's path is known, the drafted tokens on it. Unknown paths are
    ignored, which only costs acceptance.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        vocab_size: int,
        sigma: float,
        prompt: Sequence[int],
        *,
        is_coupled: bool = True,
    ) -> None:
        """Unless `is_coupled`, noise is left out, and `sigma` should be the scale of draws."""
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._sigma = np.float32(sigma)
        self._adds_noise = is_coupled and sampling.temperature > 0
        self._bias = _bias(sampling, vocab_size)
        self._noise = NoiseRows(vocab_size, filled_by(sampling.seed, sampling.temperature))
        self._seen = np.zeros(vocab_size, bool)
        self._output_counts = np.zeros(vocab_size, np.float32)
        if sampling.has_penalties:
            self._seen[np.asarray(prompt, np.int64)] = True

    @property
    def sigma(self) -> np.float32:
        """Scale of uncertainty."""
        return self._sigma

    @property
    def is_noise_alone(self) -> bool:
        """Whether scores are logits plus noise, without penalties, bias and truncation."""
        sampling = self._sampling
        truncates = sampling.temperature > 0 and (
            0 < sampling.top_k < self._vocab_size or sampling.top_p < 1 or sampling.min_p > 0
        )
        return self._bias is None and not sampling.has_penalties and not truncates

    def noise(self, first_position: int, num_positions: int) -> FloatArray:
        """Noise added to logits at consecutive positions [num_positions, vocab]; no rows without noise.

        Valid until the next call of any method.
        """
        if not self._adds_noise:
            return np.empty((0, self._vocab_size), np.float32)
        return self._noise.at(first_position, num_positions)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Add committed tokens after the prompt."""
        if self._sampling.has_penalties and token_ids:
            index = np.asarray(token_ids, np.int64)
            self._seen[index] = True
            np.add.at(self._output_counts, index, np.float32(1))

    def prepare(self, first_position: int, num_positions: int) -> None:
        """Compute noise for later positions."""
        if self._adds_noise:
            self._noise.at(first_position, num_positions)

    @property
    def asks_for_paths(self) -> bool:
        """Whether scores depend on the drafted tokens that lead to a row."""
        return self._sampling.has_penalties

    def children(
        self, logits: FloatArray, positions: Sequence[int], limit: int, paths: Paths = UNKNOWN_PATHS
    ) -> list[Children]:
        """The `limit` likeliest tokens per row, from logits [rows, vocab]; `paths` as in `scores`."""
        scores = self.scores(logits, positions, paths)
        return top_children(scores, self._sigma, limit)

    def scores(self, logits: FloatArray, positions: Sequence[int], paths: Paths = UNKNOWN_PATHS) -> FloatArray:
        """Processed logits plus noise [rows, vocab], up to a constant per row.

        `paths` are each row's drafted tokens, its own included; empty if unknown.
        """
        scores = self.processed(logits, paths)
        if not self._adds_noise:
            return scores
        first = min(positions)
        noise = self._noise.at(first, max(positions) - first + 1)
        noisy: FloatArray = scores + noise[np.asarray(positions) - first]
        return noisy

    def processed(self, logits: FloatArray, paths: Paths = UNKNOWN_PATHS) -> FloatArray:
        """Logits [rows, vocab] with penalties, bias and, at a temperature, truncation; not divided by it."""
        scores = self._penalised(logits, paths)
        if self._bias is not None:
            scores = scores + self._bias
        return scores if self._sampling.temperature == 0 else _truncated(scores, self._sampling)

    def _penalised(self, logits: FloatArray, paths: Paths) -> FloatArray:
        sampling = self._sampling
        if not sampling.has_penalties:
            return logits
        factor = np.float32(sampling.repetition_penalty)
        repeated = np.where(logits > 0, logits / factor, logits * factor)
        penalised: FloatArray = np.where(self._seen, repeated, logits)
        penalised -= np.float32(sampling.frequency_penalty) * self._output_counts
        penalised -= np.float32(sampling.presence_penalty) * (self._output_counts > 0)
        for row, path in enumerate(paths):
            tokens, counts = np.unique(np.asarray(path, np.int64), return_counts=True)
            times = self._output_counts[tokens] + counts.astype(np.float32)
            penalised[row, tokens] = (
                repeated[row, tokens]
                - np.float32(sampling.frequency_penalty) * times
                - np.float32(sampling.presence_penalty)
            )
        return penalised


def _bias(sampling: SamplingParams, vocab_size: int) -> FloatArray | None:
    """Addition to every row of logits: logit bias, and -inf for tokens that are never drawn."""
    if not (sampling.logit_bias or sampling.allowed_token_ids or sampling.bad_token_ids):
        return None
    bias = np.zeros(vocab_size, np.float32)
    if sampling.logit_bias:
        bias[list(sampling.logit_bias)] = list(sampling.logit_bias.values())
    if sampling.allowed_token_ids:
        allowed = np.zeros(vocab_size, bool)
        allowed[list(sampling.allowed_token_ids)] = True
        bias[~allowed] = _NEVER
    bias[list(sampling.bad_token_ids)] = _NEVER
    return bias


def _truncated(logits: FloatArray, sampling: SamplingParams) -> FloatArray:
    """Logits with -inf outside top-k, top-p and min-p of the drafter's own distribution."""
    vocab_size = logits.shape[-1]
    if 0 < sampling.top_k < vocab_size:
        smallest = np.partition(logits, vocab_size - sampling.top_k, axis=-1)[:, vocab_size - sampling.top_k]
        logits = np.where(logits < smallest[:, None], _NEVER, logits)
    if sampling.top_p < 1:
        logits = _nucleus(logits, sampling)
    if sampling.min_p > 0:
        floor = logits.max(-1, keepdims=True) + np.float32(sampling.temperature * np.log(sampling.min_p))
        logits = np.where(logits < floor, _NEVER, logits)
    return logits


def _nucleus(logits: FloatArray, sampling: SamplingParams) -> FloatArray:
    """Keep the likeliest tokens up to probability top-p; rows with a nucleus beyond NUCLEUS_TOKENS are unchanged."""
    vocab_size = logits.shape[-1]
    peak = logits.max(-1, keepdims=True)
    if not np.isfinite(peak).all():
        return logits
    with np.errstate(over="ignore"):
        # At temperatures close to 0 the differences are infinite.
        weights = np.exp((logits - peak) / np.float32(sampling.temperature))
    likeliest = -np.partition(-weights, min(NUCLEUS_TOKENS, vocab_size - 1), axis=-1)[:, :NUCLEUS_TOKENS]
    likeliest = -np.sort(-likeliest, axis=-1)
    share = likeliest.cumsum(-1) / weights.sum(-1, keepdims=True)
    # The token that reaches top-p is kept.
    last = (share < sampling.top_p).sum(-1)
    found = last < likeliest.shape[-1]
    smallest = np.take_along_axis(likeliest, np.minimum(last, likeliest.shape[-1] - 1)[:, None], -1)
    kept: FloatArray = np.where(found[:, None] & (weights < smallest), _NEVER, logits)
    return kept


def filled_by(seed: int, temperature: float) -> FillNoise:
    """Function that fills rows [positions, vocab]."""

    def fill(position: int, rows: FloatArray) -> None:
        np.multiply(gumbel(seed, position, *rows.shape), temperature, out=rows, casting="same_kind")

    return fill


class NoiseRows:
    """Noise times temperature: a row [tokens] per consecutive position, kept for later calls.

    The buffer has twice the rows requested at once, so that rows rarely move to its front.
    """

    def __init__(self, num_tokens: int, fill: FillNoise) -> None:
        self._fill = fill
        self._rows: FloatArray = np.empty((0, num_tokens), np.float32)
        # Position of the first valid row; valid rows are `_start` to before `_end`.
        self._position = 0
        self._start = self._end = 0

    def at(self, position: int, count: int = 1) -> FloatArray:
        """Rows [count, tokens] of `count` positions, valid until the next call."""
        if not self._position <= position <= self._position + self._end - self._start:
            self._position, self._start, self._end = position, 0, 0
        first = self._start + position - self._position
        if first + count > len(self._rows):
            first = self._make_room(first, count)
        if (missing := first + count - self._end) > 0:
            self._fill(position + count - missing, self._rows[self._end : first + count])
            self._end = first + count
        return self._rows[first : first + count]

    def _make_room(self, first: int, count: int) -> int:
        """Move rows from `first` on to the front and drop those before; returns their new index, 0."""
        kept = self._rows[first : self._end]
        rows = self._rows
        if 2 * count > len(rows):
            rows = np.empty((2 * count, rows.shape[1]), np.float32)
        rows[: len(kept)] = kept.copy()
        self._position += first - self._start
        self._rows, self._start, self._end = rows, 0, len(kept)
        return 0
