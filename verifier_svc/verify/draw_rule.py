"""A sequence's draw rule for early pruning: the score that a drawn token hardly misses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from coppice.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Threshold:
    """At a temperature, the token that the target draws reaches `score` with probability `recall`.

    What has to reach it is the early score, which is about log P(token), plus temperature times the request's noise
    for the token: the drawn token is the one with the most of just that, in the target's own scores.
    """

    temperature: float
    score: float
    recall: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0 and math.isfinite(self.score)):
            raise ValueError(f"a threshold must be a number at a temperature of at least 0, got {self}")
        if not 0 < self.recall <= 1:
            raise ValueError(f"recall must be in (0, 1], got {self.recall}")


# Coldest first.
Thresholds: TypeAlias = tuple[Threshold, ...]


@dataclass(frozen=True, slots=True)
class DrawRule:
    """A sequence's temperature and seed, and what its nodes have to reach."""

    temperature: float
    seed: int
    threshold: float


def threshold_at(thresholds: Thresholds, temperature: float) -> float | None:
    """The score that a drawn token hardly misses, between those of the nearest temperatures; None beyond the last."""
    for colder, hotter in zip((thresholds[0], *thresholds), thresholds, strict=False):
        if colder.temperature <= temperature <= hotter.temperature:
            span = hotter.temperature - colder.temperature
            share = (temperature - colder.temperature) / span if span else 0.0
            return colder.score + share * (hotter.score - colder.score)
    return None


def draw_rule(params: SamplingParams, thresholds: Thresholds, min_tokens: int = 0) -> DrawRule | None:
    """What early pruning may do for a request with these parameters; None for nothing.

    Early scores are about the target alone. Parameters that change its scores, or cut tokens off by rank, can make a
    token of any early score the drawn one. `top_p` leaves at least its own part of the weight, and lowers the best
    noisy score by the logarithm of that at most.
    """
    changes_scores = params.has_penalties or params.logit_bias or params.allowed_token_ids or params.bad_token_ids
    if changes_scores or params.grammar is not None or params.top_k or params.min_p or min_tokens:
        return None
    threshold = threshold_at(thresholds, params.temperature)
    if threshold is None:
        return None
    return DrawRule(params.temperature, params.seed, threshold + params.temperature * math.log(params.top_p))
