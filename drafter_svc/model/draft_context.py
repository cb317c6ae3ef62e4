"""The part of a sequence that a drafter reads: everything, or the first and the latest tokens of a long one.

A drafter's context may be smaller than the target's, which verifies with everything (the target-free part of HIPPO,
2601.08273). The first tokens stay as attention sinks (StreamingLLM, 2309.17453). Positions are renumbered after the
gap: a drafter trained on short rows then drafts as well after a long prompt as after a short one, and any prompt costs
at most a context to read.

The start of the latest tokens moves in steps counted from the sequence's start, so long prompts of similar length with
the same beginning keep the same tokens up to their difference, and share cached prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence

# First tokens that stay.
SINKS = 4
# Fraction of a full context that is dropped per step. About that much room is left for further tokens, half a step more
# or less: larger steps re-read the context less often.
STEP_SHARE = 0.25
# Below this, the first tokens would dominate.
LEAST_CONTEXT = 4 * SINKS


class DraftContext:
    """Tokens of one sequence that its drafter knows.

    `length` counts all tokens of the sequence; `unread` are those not in the drafter's cache.
    """

    def __init__(self, prompt: Sequence[int], max_tokens: int = 0) -> None:
        """A context that exceeds `max_tokens` is cut back; 0: no limit.

        Raises:
            ValueError: `max_tokens` is too small for a context.
        """
        if 0 < max_tokens < LEAST_CONTEXT:
            raise ValueError(f"a context has at least {LEAST_CONTEXT} tokens, got {max_tokens}")
        self._max_tokens = max_tokens
        # Known tokens, some of which may have to be read again.
        self._known: list[int] = []
        self._num_left_out = 0
        self.length = 0
        self.unread: list[int] = []
        self.extend(prompt)

    @property
    def size(self) -> int:
        """Known tokens, read or not: the position of the next one."""
        return self.length - self._num_left_out

    def extend(self, token_ids: Sequence[int]) -> bool:
        """Add committed tokens; returns whether the context was cut back, so that a new cache must read all of it."""
        self.length += len(token_ids)
        self.unread.extend(token_ids)
        self._known.extend(token_ids)
        if not 0 < self._max_tokens < len(self._known):
            return False
        step = int(STEP_SHARE * self._max_tokens)
        most = self._max_tokens - step // 2
        start = -(-(self.length + SINKS - most) // step) * step
        self._known = [*self._known[:SINKS], *self._known[start - self.length :]]
        self._num_left_out = self.length - len(self._known)
        self.read_again()
        return True

    def read_again(self) -> None:
        """Mark all tokens unread, for a new cache."""
        self.unread = self._known.copy()
