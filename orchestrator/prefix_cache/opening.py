"""The prefix cache that a configuration describes."""

from __future__ import annotations

import logging
import secrets

from orchestrator.config import Config, ConfigError
from orchestrator.prefix_cache.cache import PrefixCache
from orchestrator.prefix_cache.keys import Realm
from orchestrator.prefix_cache.memory_store import MemoryStore
from orchestrator.prefix_cache.near_store import NearStore
from orchestrator.prefix_cache.redis_store import RedisStore
from orchestrator.prefix_cache.store import CacheCounts, PrefixStore
from orchestrator.verifier_client import VerifierInfo

logger = logging.getLogger(__name__)

_SECRET_BYTES = 32
# What is near is looked up in Redis again after this: others may have added to it.
_NEAR_TTL_S = 60.0


def open_cache(config: Config, info: VerifierInfo) -> PrefixCache | None:
    """The prefix cache of an orchestrator of this target; None when it is switched off.

    Raises:
        ConfigError: there is no such Redis, or no client for it.
    """
    if not config.cache_drafter:
        return None
    if config.redis_url and not config.cache_secret:
        logger.warning("without CACHE_SECRET nobody else finds in Redis what this process remembers there")
    secret = config.cache_secret.encode() or secrets.token_bytes(_SECRET_BYTES)
    counts = CacheCounts()
    realm = Realm(secret, info.model, info.tokenizer_fingerprint)
    return PrefixCache(_store(config, counts), counts, realm, info.vocab_size)


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
