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
