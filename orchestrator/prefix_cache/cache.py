"""Prefix cache of one orchestrator: store, secret, and estimates shared by all requests."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import Sequence

from coppice.settings import ConfigError
from orchestrator.config import Config
from orchestrator.peers.verifier_client import VerifierInfo
from orchestrator.prefix_cache.drafter import CacheDrafter
from orchestrator.prefix_cache.estimates import CachePromise, HitRates
from orchestrator.prefix_cache.keys import CacheNamespace, TenantKeys
from orchestrator.prefix_cache.recall import Recall
from orchestrator.prefix_cache.redis_store import RedisStore
from orchestrator.prefix_cache.store import CacheCounts, MemoryStore, NearStore, PrefixStore
from orchestrator.prefix_cache.values import PrefixStatistics
from orchestrator.prefix_cache.write_behind import Finished, WriteBehind

# Seconds that a shutdown waits for pending writes.
_CLOSE_S = 1.0
_SECRET_BYTES = 32
# Lifetime in seconds of local copies of values in Redis: others may have added to them.
_NEAR_TTL_S = 60.0


class PrefixCache:
    """Creates a drafter for each output, and remembers finished outputs."""

    def __init__(self, store: PrefixStore, counts: CacheCounts, namespace: CacheNamespace, vocab_size: int) -> None:
        """To be created and closed on a running event loop."""
        self._store = store
        self._namespace = namespace
        self._vocab_size = vocab_size
        self._rates = HitRates()
        self._promise = CachePromise()
        # Pending reads, which may outlive their requests.
        self._reads: set[asyncio.Task[None]] = set()
        self._write_behind = WriteBehind(store, counts)
        self.counts = counts

    def drafter(
        self, cache_salt: str, tokens: Sequence[int], num_prompt: int, sampled: bool, drafts_own: bool
    ) -> CacheDrafter:
        """Drafter for an output whose committed `tokens` grow while it runs; `drafts_own`: from these, too."""
        keys = TenantKeys(self._namespace, cache_salt)

        def remember(shown: PrefixStatistics) -> None:
            self._write_behind.put(Finished(keys, tuple(tokens), num_prompt, shown))

        make_recall = functools.partial(Recall, self._store, keys, self.counts, self._vocab_size, self._reads)
        return CacheDrafter(self._rates, self._promise, make_recall, remember, tokens, num_prompt, sampled, drafts_own)

    async def flushed(self) -> None:
        """Wait until every finished output is written."""
        await self._write_behind.flushed()

    async def close(self) -> None:
        """Write pending outputs within `_CLOSE_S`, and close the store."""
        await self._write_behind.close(_CLOSE_S)
        for read in self._reads:
            read.cancel()
        if self._reads:
            await asyncio.wait(self._reads)
        await self._store.close()


logger = logging.getLogger(__name__)


def open_namespace(config: Config, info: VerifierInfo) -> CacheNamespace:
    """Namespace of this orchestrator's keys: its secret and its target."""
    if config.redis_url and not config.cache_secret:
        logger.warning("without CACHE_SECRET no other process can read what this one stores in Redis")
    secret = config.cache_secret.encode() or secrets.token_bytes(_SECRET_BYTES)
    return CacheNamespace(secret, info.model, info.serving_fingerprint or info.tokenizer_fingerprint)


def open_cache(config: Config, namespace: CacheNamespace, vocab_size: int) -> PrefixCache | None:
    """Prefix cache of an orchestrator; None if CACHE_DRAFTER is off.

    Raises:
        ConfigError: the URL is invalid, or redis-py is missing.
    """
    if not config.cache_drafter:
        return None
    counts = CacheCounts()
    return PrefixCache(_store(config, counts), counts, namespace, vocab_size)


def _store(config: Config, counts: CacheCounts) -> PrefixStore:
    max_bytes = config.cache_mib << 20
    if not config.redis_url:
        return MemoryStore(max_bytes, config.cache_ttl_s)
    try:
        far = RedisStore.open(config.redis_url, config.cache_ttl_s, config.redis_timeout_ms / 1000, counts)
    except ImportError as error:
        raise ConfigError(f"REDIS_URL needs redis-py, the extra `redis`: {error}") from error
    except ValueError as error:
        raise ConfigError(f"REDIS_URL: {error}") from error
    return NearStore(MemoryStore(max_bytes, min(config.cache_ttl_s, _NEAR_TTL_S)), far)
