"""A far store with a small one of this process in front of it, which saves round trips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator.prefix_cache.memory_store import MemoryStore
from orchestrator.prefix_cache.store import PrefixStore


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

    async def write(self, values: Mapping[bytes, bytes]) -> None:
        """Remember values, here at once."""
        await self._near.write(values)
        await self._far.write(values)

    async def close(self) -> None:
        """Close both."""
        await self._near.close()
        await self._far.close()
