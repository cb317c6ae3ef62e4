"""Sampling and stopping parameters, validated in one place; and seeds of outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from coppice.core.errors import InvalidRequestError
from coppice.core.grammar import Grammar

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_TOKEN_LIST = 1024
# The golden ratio's fraction in units of 2^-64. It is odd, so seeds repeat only after 2^64 outputs, and requests with
# nearby seeds share none.
SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of the next token; fields and defaults as in `sampling.proto`.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    allowed_token_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[int, ...] = ()
    seed: int = 0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _require("temperature", 0 <= self.temperature <= 100, self.temperature, "in [0, 100]")
        _require("top_k", self.top_k >= 0, self.top_k, "at least 0")
        _require("top_p", 0 < self.top_p <= 1, self.top_p, "in (0, 1]")
        _require("min_p", 0 <= self.min_p <= 1, self.min_p, "in [0, 1]")
        _require("repetition_penalty", 0 < self.repetition_penalty <= 100, self.repetition_penalty, "in (0, 100]")
        _require("presence_penalty", -2 <= self.presence_penalty <= 2, self.presence_penalty, "in [-2, 2]")
        _require("frequency_penalty", -2 <= self.frequency_penalty <= 2, self.frequency_penalty, "in [-2, 2]")
        for token, bias in self.logit_bias.items():
            _require(
                "logit_bias",
                math.isfinite(bias) and -100 <= bias <= 100,
                bias,
                f"in [-100, 100] (token {token})",
            )
        for name in ("logit_bias", "allowed_token_ids", "bad_token_ids"):
            size = len(getattr(self, name))
            _require(name, size <= MAX_TOKEN_LIST, size, f"at most {MAX_TOKEN_LIST} entries")
        _require("seed", 0 <= self.seed < 2**64, self.seed, "an unsigned 64-bit number")

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on earlier tokens."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def named_token_ids(self) -> Mapping[str, tuple[int, ...]]:
        """Token ids that the parameters name, by field."""
        return {
            "sampling.logit_bias": tuple(self.logit_bias),
            "sampling.allowed_token_ids": self.allowed_token_ids,
            "sampling.bad_token_ids": self.bad_token_ids,
        }


@dataclass(frozen=True)
class StoppingOptions:
    """End of the output. `max_tokens` None: up to the end of the context.

    Raises:
        InvalidRequestError: a value is out of range.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequestError("stopping.max_tokens", f"must be at least 1, got {self.max_tokens}")
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise InvalidRequestError("stopping.stop_strings", f"at most {MAX_STOP_STRINGS} are allowed")
        for text in self.stop_strings:
            if not 1 <= len(text.encode()) <= MAX_STOP_STRING_BYTES:
                raise InvalidRequestError("stopping.stop_strings", f"each must have 1 to {MAX_STOP_STRING_BYTES} bytes")
        if len(self.stop_token_ids) > MAX_TOKEN_LIST:
            raise InvalidRequestError("stopping.stop_token_ids", f"at most {MAX_TOKEN_LIST} are allowed")
        if self.min_tokens < 0:
            raise InvalidRequestError("stopping.min_tokens", f"must be at least 0, got {self.min_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                "stopping.min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}"
            )


def check_token_ids(name: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raise InvalidRequestError for the first id outside the vocabulary."""
    # A million ids are checked in milliseconds.
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for index, token in enumerate(token_ids):
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(name, f"entry {index} is {token}, outside the vocabulary of {vocab_size}")


def output_seed(seed: int, index: int) -> int:
    """Seed of output `index` of a request; output 0 has the request's seed."""
    return (seed + index * SEED_STEP) % 2**64


def _require(name: str, holds: bool, value: float, rule: str) -> None:
    if not holds or (isinstance(value, float) and not math.isfinite(value)):
        raise InvalidRequestError(f"sampling.{name}", f"must be {rule}, got {value}")
