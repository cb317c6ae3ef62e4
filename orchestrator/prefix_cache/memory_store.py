"""The prefix cache of one process: a dictionary that forgets what was not used for longest."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

# A key and the bookkeeping of an entry, about.
_OVERHEAD_BYTES = 300


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
