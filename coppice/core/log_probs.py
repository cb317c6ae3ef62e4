"""Log-probabilities of generated tokens."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.core.errors import InvalidRequestError

MAX_TOP_LOG_PROBS = 20


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """Log-probability of a generated token, and of the likeliest tokens at its position, likeliest first.

    Of the target's raw logits, as defined in `inference.proto`.
    """

    log_prob: float
    top_token_ids: tuple[int, ...] = ()
    top_log_probs: tuple[float, ...] = ()


def check_top_log_probs(name: str, number: int) -> None:
    """Raise InvalidRequestError if `number` is out of range."""
    if not 0 <= number <= MAX_TOP_LOG_PROBS:
        raise InvalidRequestError(name, f"must be in [0, {MAX_TOP_LOG_PROBS}], got {number}")
