"""Base of sequences that read their context with a model: cache, reading, starting over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coppice.draft_models.coupling import Coupling
from drafter_svc.model.draft_context import DraftContext
from drafter_svc.model.prefix_blocks import PIECE_ROWS, PrefixKey
from drafter_svc.model.tree_cache import Forward, TreeCache


class ReadContext:
    """A context, its cache, and the request's coupling, which tracks the committed tokens."""

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
        """Cached tokens."""
        return self._cache.num_cached

    def extend(self, token_ids: Sequence[int], features: bytes = b"") -> None:
        """Add committed tokens; features are ignored."""
        self._coupling.commit(token_ids)
        if self._context.extend(token_ids):
            self._start_over()

    def read(self, max_pieces: int) -> int:
        """Read cached pieces, and compute at most `max_pieces`; returns the pieces left."""
        if len(self._context.unread) <= PIECE_ROWS or self._context.size > self._max_positions:
            return 0
        self._follow()
        del self._context.unread[: self._cache.read(self._context.unread, max_pieces)]
        return max(0, len(self._context.unread) - 1) // PIECE_ROWS

    def forget(self) -> None:
        """Drop the cache: all is read again before the next draft."""
        self._context.read_again()
        self._start_over()

    def _follow(self) -> None:
        """Move unread tokens that drafts have read into the trunk; a no-op for kinds whose drafts leave no rows."""

    def _start_over(self) -> None:
        """Start with an empty cache; subclasses drop their references to old rows."""
        self._cache = self._new_cache()

    def _new_cache(self) -> TreeCache[Any]:
        # After a cut its beginning may differ.
        return TreeCache(self._forward, None if self._beginning is None else self._beginning.anew())
