"""What sequences of all kinds share that read their context with a model: its cache, and beginning it anew."""

from __future__ import annotations

from typing import Any

from drafter_svc.model.draft_context import DraftContext
from drafter_svc.model.prefix_blocks import PrefixKey
from drafter_svc.model.tree_cache import Forward, TreeCache


class ReadContext:
    """A context, and the cache of what was read of it."""

    def __init__(self, forward: Forward[Any], context: DraftContext, beginning: PrefixKey | None) -> None:
        self._forward = forward
        self._context = context
        self._beginning = beginning
        self._cache = self._new_cache()

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values are kept."""
        return self._cache.num_cached

    def forget(self) -> None:
        """Keep nothing: all is read again before the next draft."""
        self._context.read_again()
        self._start_over()

    def _start_over(self) -> None:
        """Begin with an empty cache; what a kind knows of the old one's rows is its own to drop."""
        self._cache = self._new_cache()

    def _new_cache(self) -> TreeCache[Any]:
        # It begins with other tokens where some were left out meanwhile.
        return TreeCache(self._forward, None if self._beginning is None else self._beginning.anew())
