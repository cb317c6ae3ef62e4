"""A request's settings for denoising blocks of masks, for drafters that do so."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.core.errors import InvalidRequestError

MAX_DENOISING_STEPS = 64
# More tokens than any target pays for in one round.
MAX_BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Denoising:
    """Passes over a block, and tokens of the block (SpecDiff, 2408.05636: T and gamma); 0 leaves it to the
    drafter.

    Raises:
        InvalidRequestError: a number is out of range; names the field as a `GenerateRequest` has it.
    """

    steps: int = 0
    block_tokens: int = 0

    def __post_init__(self) -> None:
        limits = (("steps", self.steps, MAX_DENOISING_STEPS), ("block_tokens", self.block_tokens, MAX_BLOCK_TOKENS))
        for name, value, most in limits:
            if not 0 <= value <= most:
                raise InvalidRequestError(f"speculation.denoising.{name}", f"must be in [0, {most}], got {value}")


LEFT_TO_DRAFTER = Denoising()
