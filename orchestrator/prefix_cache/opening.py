"""The prefix cache that a configuration describes."""

from __future__ import annotations

import logging
import secrets

from coppice.settings import ConfigError
from orchestrator.config import Config
from orchestrator.peers.verifier_client import VerifierInfo
from orchestrator.prefix_cache.cache import PrefixCache
from orchestrator.prefix_cache.keys import CacheNamespace
from orchestrator.prefix_cache.memory_store import MemoryStore
from orchestrator.prefix_cache.near_store import NearStore
from orchestrator.prefix_cache.redis_store import RedisStore
from orchestrator.prefix_cache.store import CacheCounts, PrefixStore

logger = logging.getLogger(__name__)

_SECRET_BYTES = 32
# What is near is looked up in Redis again after this: others may have added to it.
_NEAR_TTL_S = 60.0


def open_realm(config: Config, info: VerifierInfo) -> CacheNamespace:
    """Among whom things are shared that this orchestrator remembers of its target."""
    if config.redis_url and not config.cache_secret:
        logger.warning("without CACHE_SECRET nobody else finds in Redis what this process remembers there")
    secret = config.cache_secret.encode() or secrets.token_bytes(_SECRET_BYTES)
    return CacheNamespace(secret, info.model, info.tokenizer_fingerprint)


def open_cache(config: Config, realm: CacheNamespace, vocab_size: int) -> PrefixCache | None:
    """The prefix cache of an orchestrator; None when it is switched off.

    Raises:
        ConfigError: there is no such Redis, or no client for it.
    """
    if not config.cache_drafter:
        return None
    counts = CacheCounts()
    return PrefixCache(_store(config, counts), counts, realm, vocab_size)


def open_redis(config: Config, timeout_s: float, counts: CacheCounts) -> RedisStore:
    """A store in REDIS_URL whose calls take at most `timeout_s`.

    Raises:
        ConfigError: there is no such Redis, or no client for it.
    """
    try:
        return RedisStore.open(config.redis_url, config.cache_ttl_s, timeout_s, counts)
    except ImportError as error:
        raise ConfigError(f"REDIS_URL needs redis-py, the extra `redis`: {error}") from error
    except ValueError as error:
        raise ConfigError(f"REDIS_URL: {error}") from error


def _store(config: Config, counts: CacheCounts) -> PrefixStore:
    max_bytes = config.cache_mib << 20
    if not config.redis_url:
        return MemoryStore(max_bytes, config.cache_ttl_s)
    far = open_redis(config, config.redis_timeout_ms / 1000, counts)
    return NearStore(MemoryStore(max_bytes, min(config.cache_ttl_s, _NEAR_TTL_S)), far)
