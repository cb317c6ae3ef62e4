"""Prefix cache in Redis, shared by orchestrators and persistent.

redis-py is imported when a store is opened: orchestrators without Redis do not need it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.prefix_cache.store import CacheCounts

if TYPE_CHECKING:
    from redis.asyncio import Redis

# Successive failures that open the circuit breaker, and its pause in seconds, doubled by each failed trial.
_PATIENCE = 3
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
# Sets each key whose value has the given SHA-1 (empty: missing), and returns the indices of the others. A value of
# another type counts as missing, as in reads.
_REPLACE = """
local changed = {}
for place, key in ipairs(KEYS) do
  local value = redis.pcall('GET', key)
  local digest = type(value) == 'string' and redis.sha1hex(value) or ''
  if digest == ARGV[2 * place] then
    redis.call('SET', key, ARGV[2 * place + 1], 'PX', ARGV[1])
  else
    changed[#changed + 1] = place
  end
end
return changed
"""
# Limit on concurrent calls.
_MOST_CALLS = 16


class Breaker:
    """Circuit breaker: opens after successive failures, and after a pause admits one trial."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._closed_until_s = 0.0
        self._is_trying = False

    def allows(self) -> bool:
        """Whether to call now. After a pause one call is admitted until its result is known."""
        if self._failures < _PATIENCE:
            return True
        now = self._clock()
        if now < self._closed_until_s:
            return False
        self._closed_until_s = now + self._pause_s
        self._is_trying = True
        return True

    def succeeded(self) -> None:
        """Record a success."""
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._is_trying = False

    def failed(self) -> bool:
        """Record a failure; returns whether it opened the breaker."""
        self._failures += 1
        opens = self._failures == _PATIENCE
        # Failures of calls that were under way when it opened change nothing.
        if opens or self._is_trying:
            self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s) if self._is_trying else _FIRST_PAUSE_S
            self._closed_until_s = self._clock() + self._pause_s
        self._is_trying = False
        return opens


logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class RedisStore:
    """Redis client with deadlines; failures and timeouts are counted and open a circuit breaker.

    Reads and writes have separate breakers: a full Redis still answers reads.
    """

    def __init__(self, redis: Redis, ttl_s: float, timeout_s: float, counts: CacheCounts) -> None:
        self._redis = redis
        self._replace = redis.register_script(_REPLACE)
        self._ttl_ms = _milliseconds(ttl_s)
        self._timeout_s = timeout_s
        self._counts = counts
        self._reads = Breaker()
        self._writes = Breaker()
        # Calls under way, abandoned ones included.
        self._calls: set[asyncio.Future[Any]] = set()

    @classmethod
    def open(cls, url: str, ttl_s: float, timeout_s: float, counts: CacheCounts) -> RedisStore:
        """Store at `redis://...`, not connected yet.

        Raises:
            ImportError: redis-py is not installed.
            ValueError: the URL is invalid.
        """
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        redis = Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            max_connections=_MOST_CALLS,
        )
        return cls(redis, ttl_s, timeout_s, counts)

    async def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """One MGET."""
        values = await self._call(self._reads, self._redis.mget(keys)) if keys and self._may(self._reads) else None
        if values is None or len(values) != len(keys):
            return [None] * len(keys)
        return [value if isinstance(value, bytes) else None for value in values]

    async def replace(self, before: Mapping[bytes, bytes | None], after: Mapping[bytes, bytes]) -> list[bytes]:
        """Compare-and-set in one Lua script, which Redis runs atomically: no concurrent change is lost.

        Previous values are sent as digests. A call that fails may have set some of the values.
        """
        if not after or not self._may(self._writes):
            return []
        keys, arguments = list(after), [str(self._ttl_ms).encode()]
        for key in keys:
            value = before[key]
            arguments += [b"" if value is None else _sha1(value), after[key]]
        changed = await self._call(self._writes, self._replace(keys, arguments))
        return [keys[place - 1] for place in changed or ()]

    async def close(self) -> None:
        """Close the connections."""
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls, timeout=self._timeout_s)
        await self._call(Breaker(), self._redis.aclose())

    def _may(self, breaker: Breaker) -> bool:
        if len(self._calls) < _MOST_CALLS and breaker.allows():
            return True
        self._counts.skipped += 1
        return False

    async def _call(self, breaker: Breaker, call: Awaitable[Answer]) -> Answer | None:
        # In a task of its own, so that the library's handling of a cancellation does not delay the caller.
        task = asyncio.ensure_future(call)
        self._calls.add(task)
        task.add_done_callback(self._ended)
        try:
            await asyncio.wait({task}, timeout=self._timeout_s)
        finally:
            late = not task.done()
            task.cancel()
        error = TimeoutError("no answer in time") if late or task.cancelled() else task.exception()
        if error is not None:
            self._counts.errors += 1
            if breaker.failed():
                logger.warning("Redis fails repeatedly, pausing calls: %s: %s", type(error).__name__, error)
            return None
        breaker.succeeded()
        return task.result()

    def _ended(self, call: asyncio.Future[Any]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            # Retrieve the exception, or asyncio reports it as never retrieved.
            call.exception()


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _sha1(value: bytes) -> bytes:
    return hashlib.sha1(value, usedforsecurity=False).hexdigest().encode()
