"""Settings for drafters that denoise blocks of masks."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.core.errors import InvalidRequestError

MAX_DENOISING_STEPS = 64
# Above the number of tokens worth verifying in a round.
MAX_BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Denoising:
    """Denoising passes per block and tokens per block (T and gamma in SpecDiff, 2408.05636); 0: the drafter's default.

    Raises:
        InvalidRequestError: a number is out of range; the field is named as in `GenerateRequest`.
    """

    steps: int = 0
    block_tokens: int = 0

    def __post_init__(self) -> None:
        limits = (("steps", self.steps, MAX_DENOISING_STEPS), ("block_tokens", self.block_tokens, MAX_BLOCK_TOKENS))
        for name, value, most in limits:
            if not 0 <= value <= most:
                raise InvalidRequestError(f"speculation.denoising.{name}", f"must be in [0, {most}], got {value}")


LEFT_TO_DRAFTER = Denoising()
