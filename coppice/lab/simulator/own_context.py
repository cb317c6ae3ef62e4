"""The orchestrator's cache as far as a request's own context goes: nothing is remembered of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from orchestrator.prefix_cache.cache_drafter import CacheDrafter
from orchestrator.prefix_cache.estimates import CachePromise, HitRates

if TYPE_CHECKING:
    from orchestrator.prefix_cache.recall import Recall


class _NothingRemembered:
    """Stands for what is remembered of other requests."""

    knows_prompt = False

    def begin(self, tokens: Sequence[int], num_prompt: int) -> None:
        """Ask for what followed the prompt."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Ask for what followed the tokens."""

    def close(self) -> None:
        """Ask for nothing more."""


class OwnContext:
    """What a server's requests know of how often guesses from their own context are right, and of drafters."""

    def __init__(self) -> None:
        self._rates = HitRates()
        self._promise = CachePromise()

    def drafter(self, tokens: Sequence[int], num_prompt: int) -> CacheDrafter:
        """The cache's drafts for a request whose `tokens` grow while it runs, greedily decoded."""
        nothing = cast("Recall", _NothingRemembered())
        return CacheDrafter(
            self._rates, self._promise, lambda _: nothing, lambda _: None, tokens, num_prompt, sampled=False
        )
