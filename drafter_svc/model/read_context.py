"""The base of sequences that read their context with a model: the cache, reading, and starting over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafter_svc.model.draft_context import DraftContext
from drafter_svc.model.prefix_blocks import PIECE_ROWS, PrefixKey
from drafter_svc.model.tree_cache import Forward, TreeCache
from drafter_svc.search.coupling import Coupling


class ReadContext:
    """A context, the cache of what was read of it, and the request's coupling, which knows its committed tokens."""

    def __init__(
        self, forward: Forward[Any], context: DraftContext, coupling: Coupling, beginning: PrefixKey | None
    ) -> None:
        self._forward = forward
        self._max_positions = forward.max_positions
        self._context = context
        self._coupling = coupling
        self._beginning = beginning
        self._cache = self._new_cache()

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values are kept."""
        return self._cache.num_cached

    def extend(self, token_ids: Sequence[int], features: bytes = b"") -> None:
        """Take in committed tokens; features are not needed."""
        self._coupling.commit(token_ids)
        if self._context.extend(token_ids):
            self._start_over()

    def read(self, max_pieces: int) -> int:
        """Read what costs nothing and at most `max_pieces` pieces; returns how many are left."""
        if len(self._context.unread) <= PIECE_ROWS or self._context.size > self._max_positions:
            return 0
        self._follow()
        del self._context.unread[: self._cache.read(self._context.unread, max_pieces)]
        return max(0, len(self._context.unread) - 1) // PIECE_ROWS

    def forget(self) -> None:
        """Keep nothing: all is read again before the next draft."""
        self._context.read_again()
        self._start_over()

    def _follow(self) -> None:
        """Take unread tokens into the trunk that drafts have read; kinds whose drafts leave no rows have none."""

    def _start_over(self) -> None:
        """Begin with an empty cache; what a kind knows of the old one's rows is its own to drop."""
        self._cache = self._new_cache()

    def _new_cache(self) -> TreeCache[Any]:
        # It begins with other tokens where some were left out meanwhile.
        return TreeCache(self._forward, None if self._beginning is None else self._beginning.anew())
