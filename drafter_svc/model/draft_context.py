"""The part of a sequence that a drafter reads: all of it or, of a long one, its first tokens and its latest.

A drafter's context may be smaller than the target's, which sees everything anyhow (the part of HIPPO, 2601.08273, that
needs no target). The first tokens stay, since attention leans on them (StreamingLLM, 2309.17453). Places are counted
anew behind what was left out: a drafter that was trained on short rows guesses behind a long prompt as behind a short
one, and a prompt of any length costs no more to read than the context.

Where the latest tokens begin moves in steps that are counted from the sequence's start. Long prompts that begin alike
and are about as long thus keep the same tokens up to where they differ, which one of them alone has to read.
"""

from __future__ import annotations

from collections.abc import Sequence

# First tokens that stay.
SINKS = 4
# Of a context that has become full, the share that is left out in one step. About that much room is left for further
# tokens, half a step more or less: the more it is, the less often the context is read again.
STEP_SHARE = 0.25
# Below this, the first tokens would be most of it.
LEAST_CONTEXT = 4 * SINKS


class DraftContext:
    """The tokens of one sequence that its drafter knows.

    `length` counts all of the sequence's, `unread` are those that the drafter's cache has not seen.
    """

    def __init__(self, prompt: Sequence[int], max_tokens: int = 0) -> None:
        """A context that grows beyond `max_tokens` is cut back; with 0 it grows with the sequence.

        Raises:
            ValueError: there is no room for a context that could be cut back.
        """
        if 0 < max_tokens < LEAST_CONTEXT:
            raise ValueError(f"a context has at least {LEAST_CONTEXT} tokens, got {max_tokens}")
        self._max_tokens = max_tokens
        # Those that are known: some may have to be read again.
        self._known: list[int] = []
        self._num_left_out = 0
        self.length = 0
        self.unread: list[int] = []
        self.extend(prompt)

    @property
    def size(self) -> int:
        """Tokens that are known, read or not: the place of the next one."""
        return self.length - self._num_left_out

    def extend(self, token_ids: Sequence[int]) -> bool:
        """Take in committed tokens; whether the context was cut back, so that a new cache has to read all of it."""
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
        """The drafter's cache is a new one."""
        self.unread = self._known.copy()
