"""Stores of remembered values: a protocol, and its forms in the memory of this process. None ever raises."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

# A key and the bookkeeping of an entry, about.
_OVERHEAD_BYTES = 300


@dataclass
class CacheCounts:
    """What has happened to the prefix cache since the process started."""

    reads: int = 0
    hits: int = 0
    misses: int = 0
    # Values that were none of ours, or not whole.
    invalid_values: int = 0
    # Calls of the store that failed or took too long, and those that were not made since others just had.
    errors: int = 0
    skipped: int = 0
    # Finished outputs that came faster than they could be written.
    dropped_outputs: int = 0
    # Finished outputs that are not written yet.
    unwritten_outputs: int = 0
    # Changes of a value that others had changed meanwhile, and of these the ones that were given up.
    conflicts: int = 0
    lost_changes: int = 0


class PrefixStore(Protocol):
    """Remembers bytes for a while. What goes wrong is counted and looks like something forgotten."""

    async def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of keys, in their order, in one round trip; None for what is not there."""

    async def replace(self, before: Mapping[bytes, bytes | None], after: Mapping[bytes, bytes]) -> list[bytes]:
        """Put the values of `after` in place of those of `before`, which has the same keys, in one round trip.

        Returns the keys that had another value by then: these keep it, and the next read tells it.
        """

    async def close(self) -> None:
        """Let go of connections."""


class MemoryStore:
    """Holds at most `max_bytes`, each value for at most `ttl_s`."""

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        # Value and time of death, the least recently used first.
        self._values: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()
        self.num_bytes = 0

    async def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of keys; None for what is not there."""
        now = self._clock()
        return [self._get(key, now) for key in keys]

    async def write(self, values: Mapping[bytes, bytes]) -> None:
        """Remember values."""
        dies = self._clock() + self._ttl_s
        for key, value in values.items():
            self._forget(key)
            self._values[key] = (value, dies)
            self.num_bytes += len(value) + _OVERHEAD_BYTES
        while self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._values)))

    async def replace(self, before: Mapping[bytes, bytes | None], after: Mapping[bytes, bytes]) -> list[bytes]:
        """Remember the values of `after` where those of `before` still are; returns the other keys."""
        now = self._clock()
        changed = [key for key in after if self._get(key, now) != before[key]]
        await self.write({key: value for key, value in after.items() if key not in changed})
        return changed

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remember nothing of these."""
        for key in keys:
            self._forget(key)

    async def close(self) -> None:
        """Forget everything."""
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
    """Reads from the near store what it has and the rest from the far one; writes to both."""

    def __init__(self, near: MemoryStore, far: PrefixStore) -> None:
        self._near = near
        self._far = far

    async def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of keys, at most one round trip away."""
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
        """Remember the values of `after`, unless others have changed them in the far store; returns those keys.

        What the far store does not take for another reason is remembered here all the same.
        """
        changed = await self._far.replace(before, after)
        self._near.forget(changed)
        await self._near.write({key: value for key, value in after.items() if key not in changed})
        return changed

    async def close(self) -> None:
        """Close both."""
        await self._near.close()
        await self._far.close()
