"""The prefix cache of one orchestrator: its store, its secret, and what all requests share."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from orchestrator.prefix_cache.cache_drafter import CacheDrafter
from orchestrator.prefix_cache.cache_promise import CachePromise
from orchestrator.prefix_cache.hit_rates import HitRates
from orchestrator.prefix_cache.keys import CacheNamespace, TenantKeys
from orchestrator.prefix_cache.prefix_statistics import PrefixStatistics
from orchestrator.prefix_cache.recall import Recall
from orchestrator.prefix_cache.store import CacheCounts, PrefixStore
from orchestrator.prefix_cache.write_behind import Finished, WriteBehind

# How long a stop may wait for what has not been written yet.
_CLOSE_S = 1.0


class PrefixCache:
    """Makes a drafter for each output, and remembers what outputs have said."""

    def __init__(self, store: PrefixStore, counts: CacheCounts, realm: CacheNamespace, vocab_size: int) -> None:
        """To be made, and closed, where an event loop runs."""
        self._store = store
        self._realm = realm
        self._vocab_size = vocab_size
        self._rates = HitRates()
        self._promise = CachePromise()
        # Reads of requests, which may outlive them.
        self._reads: set[asyncio.Task[None]] = set()
        self._write_behind = WriteBehind(store, counts)
        self.counts = counts

    def drafter(self, cache_salt: str, tokens: Sequence[int], num_prompt: int, sampled: bool) -> CacheDrafter:
        """A drafter for an output whose committed `tokens` grow while it runs."""
        keys = TenantKeys(self._realm, cache_salt)

        def remember(shown: PrefixStatistics) -> None:
            self._write_behind.put(Finished(keys, tuple(tokens), num_prompt, shown))

        make_recall = functools.partial(Recall, self._store, keys, self.counts, self._vocab_size, self._reads)
        return CacheDrafter(self._rates, self._promise, make_recall, remember, tokens, num_prompt, sampled)

    async def flushed(self) -> None:
        """Return when every output that has ended is written."""
        await self._write_behind.flushed()

    async def close(self) -> None:
        """Write what waits, as far as that is quick, and let go of the store."""
        await self._write_behind.close(_CLOSE_S)
        for read in self._reads:
            read.cancel()
        if self._reads:
            await asyncio.wait(self._reads)
        await self._store.close()
