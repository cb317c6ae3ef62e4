"""Near-ties where `top_k`, `top_p` or `min_p` cut: which tokens rounding could let in or leave out.

Scores are logits over the temperature, before any cut [vocab], and `slack` is how far rounding may move two of them
towards each other or past each other: each moves by less than half of it. What is said here errs on one side alone. A
token that is said to stay in, or to stay out, does so however the scores are rounded.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from coppice.core.sampling import SamplingParams
from tests.oracles.numpy_chooser import NumpyChooser

# Of an exponent: beyond it, at temperatures of next to nothing, one token has all the weight either way.
_MAX_EXPONENT = 500.0

Scores = npt.NDArray[np.float64]


def has_cuts(params: SamplingParams, vocab_size: int) -> bool:
    """Whether any token may be cut off."""
    return 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0


def is_near_tie(params: SamplingParams, scores: Scores, noise: Scores, chosen: int, slack: float) -> bool:
    """Whether rounding could give another token than `chosen`, the one with the most noise and score that no cut took.

    Either the chosen token falls out of a cut; or a rival that comes as high as it does is in, or gets in. Of several
    rivals only the one of the highest score need be looked at, for every cut takes lower scores first.
    """
    noisy = scores + noise
    if noisy[chosen] == -math.inf:
        # The parameters forbid every token, and rounding allows none.
        return False
    rivals = noisy > noisy[chosen] - slack
    rivals[chosen] = False
    if rivals.any() and _may_stay(params, scores, float(scores[rivals].max()), slack):
        return True
    return _may_leave(params, scores, chosen, slack)


def _may_leave(params: SamplingParams, scores: Scores, token: int, slack: float) -> bool:
    """Whether a token that is kept could be cut off: its own score falls, and those above it rise."""
    score = scores[token]
    others = np.delete(scores, token)
    kept = others
    if 0 < params.top_k < scores.size:
        kept = np.partition(others, -params.top_k)[-params.top_k :]
        # The k-th best of the others would take its place.
        if kept.min() > score - slack:
            return True
        kept = np.partition(kept, 0)[1:]
    is_above = kept > score - slack
    if params.top_p < 1:
        peak = max(score, kept.max(initial=score))
        weights = np.exp(kept - peak)
        above = weights[is_above].sum() * math.exp(min(slack, _MAX_EXPONENT))
        rest = weights[~is_above].sum() + math.exp(score - peak)
        if above * (1 - params.top_p) > params.top_p * rest:
            return True
    return params.min_p > 0 and bool(kept.max(initial=-math.inf) + math.log(params.min_p) > score - slack)


def _may_stay(params: SamplingParams, scores: Scores, score: float, slack: float) -> bool:
    """Whether a token of this score could be kept: it rises, and those well above it fall."""
    kept = scores
    if 0 < params.top_k < scores.size:
        worst = np.partition(scores, -params.top_k)[-params.top_k] - slack
        if score <= worst:
            return False
        kept = scores[scores > worst]
    peak = kept.max()
    if params.top_p < 1:
        weights = np.exp(kept - peak)
        is_above = kept >= score + slack
        above = weights[is_above].sum() * math.exp(-slack)
        if above * (1 - params.top_p) >= params.top_p * weights[~is_above].sum():
            return False
    return params.min_p == 0 or bool(peak + math.log(params.min_p) < score + slack)


def is_near_tie_of(chooser: NumpyChooser, logits: npt.NDArray[np.float32], position: int, gap: float) -> bool:
    """Whether the token that a chooser says is a near-tie: logits that are off by less than half of `gap` change it."""
    params, scores = chooser.params, chooser.processed(logits)
    if params.temperature == 0:
        return _gap(scores.astype(np.float64), int(scores.argmax())) < gap
    scaled, noise, slack = chooser.tempered(scores), chooser.noise(position), gap / params.temperature
    noisy = chooser.cut(scaled) + noise
    chosen = int(noisy.argmax())
    if not has_cuts(params, scores.size):
        return _gap(noisy, chosen) < slack
    return is_near_tie(params, scaled, noise, chosen, slack)


def _gap(scores: Scores, best: int) -> float:
    """How far the second best score is behind the best; infinite where there is no other."""
    second = max(scores[:best].max(initial=-np.inf), scores[best + 1 :].max(initial=-np.inf))
    return float(scores[best]) - float(second)
