"""Stores of the prefix cache: protocol and in-memory implementation. None raises."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

# Approximate size of a key and an entry's bookkeeping.
_OVERHEAD_BYTES = 300


@dataclass
class CacheCounts:
    """Counts of the prefix cache since the process started."""

    reads: int = 0
    hits: int = 0
    misses: int = 0
    # Values of another format, or damaged.
    invalid_values: int = 0
    # Store calls that failed or timed out, and calls skipped by the circuit breaker.
    errors: int = 0
    skipped: int = 0
    # Finished outputs dropped because the queue of writes was full.
    dropped_outputs: int = 0
    # Finished outputs waiting to be written.
    unwritten_outputs: int = 0
    # Values changed by others between read and write, and changes lost after the second attempt.
    conflicts: int = 0
    lost_changes: int = 0


class PrefixStore(Protocol):
    """Byte store with expiry. Errors are counted and look like missing values."""

    async def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values of the keys in order, in one round trip; None if missing."""

    async def replace(self, before: Mapping[bytes, bytes | None], after: Mapping[bytes, bytes]) -> list[bytes]:
        """Replace the values of `before` by those of `after` (same keys), in one round trip.

        Returns the keys whose value has changed since: they keep it, and the next read returns it.
        """

    async def close(self) -> None:
        """Close connections."""


class MemoryStore:
    """LRU cache of at most `max_bytes`, each value for at most `ttl_s` seconds."""

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        # Value and expiry time, least recently used first.
        self._values: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()
        self.num_bytes = 0

    async def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values of the keys; None if missing."""
        now = self._clock()
        return [self._get(key, now) for key in keys]

    async def write(self, values: Mapping[bytes, bytes]) -> None:
        """Store values."""
        dies = self._clock() + self._ttl_s
        for key, value in values.items():
            self._forget(key)
            self._values[key] = (value, dies)
            self.num_bytes += len(value) + _OVERHEAD_BYTES
        while self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._values)))

    async def replace(self, before: Mapping[bytes, bytes | None], after: Mapping[bytes, bytes]) -> list[bytes]:
        """Store `after` where the values of `before` are unchanged; returns the other keys."""
        now = self._clock()
        changed = [key for key in after if self._get(key, now) != before[key]]
        await self.write({key: value for key, value in after.items() if key not in changed})
        return changed

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drop these keys."""
        for key in keys:
            self._forget(key)

    async def close(self) -> None:
        """Drop everything."""
        self._values.clear()
        self.num_bytes = 0

    def _get(self, key: bytes, now: float) -> bytes | None:
        entry = self._values.get(key)
        if entry is None:
            return None
        value, dies = entry
        if now >= dies:
            self._forget(key)
            return None
        self._values.move_to_end(key)
        return value

    def _forget(self, key: bytes) -> None:
        if (entry := self._values.pop(key, None)) is not None:
            self.num_bytes -= len(entry[0]) + _OVERHEAD_BYTES


class NearStore:
    """Two levels: reads from the near store, and misses from the far one; writes to both."""

    def __init__(self, near: MemoryStore, far: PrefixStore) -> None:
        self._near = near
        self._far = far

    async def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values of the keys, in at most one round trip."""
        values = await self._near.read(keys)
        missing = [at for at, value in enumerate(values) if value is None]
        if not missing:
            return values
        found = await self._far.read([keys[at] for at in missing])
        for at, value in zip(missing, found, strict=True):
            values[at] = value
        await self._near.write({keys[at]: value for at in missing if (value := values[at]) is not None})
        return values

    async def replace(self, before: Mapping[bytes, bytes | None], after: Mapping[bytes, bytes]) -> list[bytes]:
        """Replace values unless others have changed them in the far store; returns those keys.

        Values that the far store failed to take are stored near all the same.
        """
        changed = await self._far.replace(before, after)
        self._near.forget(changed)
        await self._near.write({key: value for key, value in after.items() if key not in changed})
        return changed

    async def close(self) -> None:
        """Close both."""
        await self._near.close()
        await self._far.close()
