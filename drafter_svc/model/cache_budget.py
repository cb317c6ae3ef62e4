"""Limit on cached tokens of all sequences together. For the model thread, except for the counts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary, WeakSet


@runtime_checkable
class CachingSequence(Protocol):
    """A sequence with a KV cache."""

    @property
    def num_cached(self) -> int:
        """Cached tokens, those of trees included."""

    def forget(self) -> None:
        """Drop the cache; needed tokens are read again before the next draft."""


class CacheBudget:
    """Drops the caches of the least recently used sequences while all together exceed `max_tokens`; 0: no limit.

    Holds weak references only: ended sequences do not count.
    """

    def __init__(self, max_tokens: int = 0) -> None:
        self._max_tokens = max_tokens
        # Least recently used first.
        self._sizes: WeakKeyDictionary[CachingSequence, int] = WeakKeyDictionary()
        # Sequences whose cache was dropped and not used since.
        self._forgetful: WeakSet[CachingSequence] = WeakSet()
        # As of the last use; and number of dropped caches.
        self.num_tokens = 0
        self.num_forgotten = 0
        self._is_held = False

    def note(self, sequence: object) -> None:
        """Record the use of a sequence, whose cache is kept."""
        if not isinstance(sequence, CachingSequence):
            return
        self._forgetful.discard(sequence)
        self._sizes.pop(sequence, None)
        self._sizes[sequence] = sequence.num_cached
        self.num_tokens = sum(self._sizes.values())
        if not self._is_held:
            self._make_room()

    def has_forgotten(self, sequence: object) -> bool:
        """Whether this sequence's cache was dropped and not used since."""
        # Other sequences need not be hashable.
        return isinstance(sequence, CachingSequence) and sequence in self._forgetful

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Postpone evictions while the context is open, for joint drafts."""
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
