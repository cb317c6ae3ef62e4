"""Prefixes of prompts by verifier, shared in Redis among orchestrators of the same verifiers.

Only a hint: if wrong or missing, a prefix is computed again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from orchestrator.prefix_cache.keys import CacheNamespace, TenantKeys
from orchestrator.prefix_cache.store import CacheCounts

logger = logging.getLogger(__name__)

# Longest wait for an answer, in seconds; a later answer serves the next request.
WAIT_S = 0.005
# Lifetime of a note in seconds, a guess at how long the verifier keeps the prefix.
TTL_S = 600.0
# Seconds to collect notes before a write, notes per write, and notes that may wait.
_COLLECT_S = 0.1
_MOST_KEYS = 256
_MOST_WAITING = 4096
# Header of values: version and kind (distinct from those of the prefix cache and the planner), then the verifier.
_HEAD = bytes((1, 17))
_VERIFIER_BYTES = 8

# Called with a verifier's digest and the number of leading blocks it was sent.
OnFound = Callable[[bytes, int], None]


class AffinityStore(Protocol):
    """Byte store with expiry. Calls have deadlines; errors look like missing values."""

    async def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values of the keys in order, in one round trip; None if missing."""

    async def write(self, values: Mapping[bytes, bytes], ttl_s: float) -> None:
        """Store values for `ttl_s` seconds, in one round trip."""

    async def close(self) -> None:
        """Close connections."""


def verifier_digest(instance_id: str) -> bytes:
    """Short id of a verifier process."""
    return hashlib.blake2b(instance_id.encode(), digest_size=_VERIFIER_BYTES).digest()


def landmarks(num_blocks: int) -> Iterator[int]:
    """Prefix lengths in blocks that are noted and looked up: two per doubling, and the whole.

    This bounds the keys of long prompts and finds at least two thirds of a shared prefix.
    """
    step = 1
    while step < num_blocks:
        yield step
        if step > 1 and step * 3 // 2 < num_blocks:
            yield step * 3 // 2
        step *= 2
    if num_blocks:
        yield num_blocks


class SharedAffinity:
    """Looks up and records which verifier has a prefix; writes are asynchronous, the last one wins."""

    def __init__(self, store: AffinityStore, counts: CacheCounts, namespace: CacheNamespace) -> None:
        """To be created and closed on a running event loop."""
        self._store = store
        self._namespace = namespace
        # Verifier by salt and prefix digest.
        self._notes: dict[tuple[str, bytes], bytes] = {}
        self._news = asyncio.Event()
        self._reads: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._run(), name="shared affinity")
        self.counts = counts

    def note(self, instance_id: str, salt: str, digests: Sequence[bytes]) -> None:
        """Record that a verifier was sent these blocks; dropped if too many notes wait."""
        if len(self._notes) < _MOST_WAITING:
            verifier = verifier_digest(instance_id)
            self._notes.update(((salt, digests[number - 1]), verifier) for number in landmarks(len(digests)))
            self._news.set()

    async def look_up(self, salt: str, digests: Sequence[bytes], on_found: OnFound) -> None:
        """Look up the verifiers of these blocks, for at most `WAIT_S`; `on_found` may be called later."""
        read = asyncio.create_task(self._read(TenantKeys(self._namespace, salt), digests, on_found))
        self._reads.add(read)
        read.add_done_callback(self._reads.discard)
        await asyncio.wait({read}, timeout=WAIT_S)

    async def close(self) -> None:
        """Close the store; pending notes are dropped."""
        tasks = {self._task, *self._reads}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self._store.close()

    async def _read(self, keys: TenantKeys, digests: Sequence[bytes], on_found: OnFound) -> None:
        numbers = list(landmarks(len(digests)))
        self.counts.reads += 1
        values = await self._store.read([keys.holder(digests[number - 1]) for number in numbers])
        for number, value in zip(numbers, values, strict=True):
            if value is None:
                self.counts.misses += 1
            elif len(value) != len(_HEAD) + _VERIFIER_BYTES or not value.startswith(_HEAD):
                self.counts.invalid_values += 1
            else:
                self.counts.hits += 1
                on_found(value[len(_HEAD) :], number)

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(_COLLECT_S)
            written = list(self._notes.items())[:_MOST_KEYS]
            for place, _ in written:
                del self._notes[place]
            if not self._notes:
                self._news.clear()
            try:
                await self._store.write(self._values(written), TTL_S)
            except Exception:
                # A bug must not stop the sharing.
                logger.exception("shared affinity could not be written")

    def _values(self, notes: Sequence[tuple[tuple[str, bytes], bytes]]) -> dict[bytes, bytes]:
        keys = {salt: TenantKeys(self._namespace, salt) for (salt, _), _ in notes}
        return {keys[salt].holder(digest): _HEAD + verifier for (salt, digest), verifier in notes}
