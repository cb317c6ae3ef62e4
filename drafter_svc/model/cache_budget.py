"""A bound on the cached tokens of all sequences together. The model thread's own, but for the numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary, WeakSet


@runtime_checkable
class CachingSequence(Protocol):
    """A sequence that keeps what it has read."""

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values it keeps, those of trees among them."""
        ...

    def forget(self) -> None:
        """Keep nothing; what is needed is read again before the next draft."""
        ...


class CacheBudget:
    """Has the sequences forget that were worked for longest ago, while all together keep more than `max_tokens`.

    Sequences that have ended count no more, and none is kept alive. With 0 there is no limit.
    """

    def __init__(self, max_tokens: int = 0) -> None:
        self._max_tokens = max_tokens
        # From the one that was worked for longest ago to the latest.
        self._sizes: WeakKeyDictionary[CachingSequence, int] = WeakKeyDictionary()
        # Those that were made to forget, and nothing was read or drafted for since.
        self._forgetful: WeakSet[CachingSequence] = WeakSet()
        # As of the last work, and how often a sequence was made to forget.
        self.num_tokens = 0
        self.num_forgotten = 0
        self._is_held = False

    def note(self, sequence: object) -> None:
        """Something was read or drafted for this sequence, which is not the one to forget."""
        if not isinstance(sequence, CachingSequence):
            return
        self._forgetful.discard(sequence)
        self._sizes.pop(sequence, None)
        self._sizes[sequence] = sequence.num_cached
        self.num_tokens = sum(self._sizes.values())
        if not self._is_held:
            self._make_room()

    def has_forgotten(self, sequence: object) -> bool:
        """Whether this sequence was made to forget, and nothing was read or drafted for it since."""
        # What keeps nothing may well not be hashable, either.
        return isinstance(sequence, CachingSequence) and sequence in self._forgetful

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While drafts are made for several sequences nobody has to forget, and room is made when they are made."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            self._make_room()

    def _make_room(self) -> None:
        if not self._max_tokens or self.num_tokens <= self._max_tokens:
            return
        *others, _ = self._sizes.items()
        for other, size in others:
            if self.num_tokens <= self._max_tokens:
                return
            other.forget()
            self._forgetful.add(other)
            del self._sizes[other]
            self.num_tokens -= size
            self.num_forgotten += 1
