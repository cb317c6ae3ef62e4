"""States of a prompt's rows, on their way to drafters that read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verifier_svc.engine.kv_cache import HalfArray


@dataclass(frozen=True, slots=True)
class PromptStates:
    """Features [tokens, feature size] of consecutive tokens of a prompt, the first of which is number `first_token`."""

    first_token: int
    states: HalfArray

    def pieces(self, most_bytes: int) -> Iterator[tuple[int, bytes]]:
        """First tokens and row-major features of pieces of at most `most_bytes`, or of one token."""
        size = max(1, most_bytes // self.states[0].nbytes)
        for start in range(0, len(self.states), size):
            yield self.first_token + start, self.states[start : start + size].tobytes()
