"""A sequence's draw rule for early pruning: a score that drawn tokens seldom miss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from coppice.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Threshold:
    """At a temperature, the token drawn by the target reaches `score` with probability `recall`.

    The early score, about log P(token), plus temperature times the request's noise for the token must reach it: the
    drawn token maximises this sum in the target's own scores.
    """

    temperature: float
    score: float
    recall: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0 and math.isfinite(self.score)):
            raise ValueError(f"a threshold must be a number at a temperature of at least 0, got {self}")
        if not 0 < self.recall <= 1:
            raise ValueError(f"recall must be in (0, 1], got {self.recall}")


# Ascending by temperature.
Thresholds: TypeAlias = tuple[Threshold, ...]


@dataclass(frozen=True, slots=True)
class DrawRule:
    """Temperature, seed and threshold of a sequence's nodes."""

    temperature: float
    seed: int
    threshold: float


def threshold_at(thresholds: Thresholds, temperature: float) -> float | None:
    """Threshold interpolated between the nearest temperatures; None beyond the last."""
    for colder, hotter in zip((thresholds[0], *thresholds), thresholds, strict=False):
        if colder.temperature <= temperature <= hotter.temperature:
            span = hotter.temperature - colder.temperature
            share = (temperature - colder.temperature) / span if span else 0.0
            return colder.score + share * (hotter.score - colder.score)
    return None


def draw_rule(params: SamplingParams, thresholds: Thresholds, min_tokens: int = 0) -> DrawRule | None:
    """Draw rule for a request's parameters; None disables early pruning.

    Early scores approximate the target's raw scores. With parameters that change scores, or cut tokens off by rank, a
    token of any early score may be drawn. `top_p` keeps at least its share of the weight, and lowers the best noisy
    score by at most its log.
    """
    changes_scores = params.has_penalties or params.logit_bias or params.allowed_token_ids or params.bad_token_ids
    if changes_scores or params.grammar is not None or params.top_k or params.min_p or min_tokens:
        return None
    threshold = threshold_at(thresholds, params.temperature)
    if threshold is None:
        return None
    return DrawRule(params.temperature, params.seed, threshold + params.temperature * math.log(params.top_p))
