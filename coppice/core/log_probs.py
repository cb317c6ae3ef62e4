"""Log-probabilities of a generated token, and how many of them may be asked for."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.core.errors import InvalidRequestError

MAX_TOP_LOG_PROBS = 20


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """A generated token's log-probability and those of the likeliest tokens at its place, likeliest first.

    Of the target's raw logits, as `inference.proto` defines them.
    """

    log_prob: float
    top_token_ids: tuple[int, ...] = ()
    top_log_probs: tuple[float, ...] = ()


def check_top_log_probs(name: str, number: int) -> None:
    """Raise InvalidRequestError, naming the field, for more likeliest tokens than may be asked for."""
    if not 0 <= number <= MAX_TOP_LOG_PROBS:
        raise InvalidRequestError(name, f"must be in [0, {MAX_TOP_LOG_PROBS}], got {number}")
