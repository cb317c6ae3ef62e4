"""Beginnings of prompts by verifier, kept in Redis for all orchestrators of the same verifiers.

A hint, as everything there: wrong or missing, it costs the time to compute a prompt's beginning again.
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

# The longest that a request waits for an answer; what comes later serves the next one.
WAIT_S = 0.005
# How long it is remembered that a verifier was given a beginning: it keeps it for as long as it has room.
TTL_S = 600.0
# How long notes are collected before they are written together, how many at once, and how many may wait.
_COLLECT_S = 0.1
_MOST_KEYS = 256
_MOST_WAITING = 4096
# Of the values: a version, a kind (those of the prefix cache and of knowledge are others), and a verifier.
_HEAD = bytes((1, 17))
_VERIFIER_BYTES = 8

# Told how many of the first blocks the verifier of this digest was given.
OnFound = Callable[[bytes, int], None]


class AffinityStore(Protocol):
    """Remembers bytes for a while. Every call has a deadline; what goes wrong looks like something forgotten."""

    async def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of keys, in their order, in one round trip; None for what is not there."""

    async def write(self, values: Mapping[bytes, bytes], ttl_s: float) -> None:
        """Remember values for so long, in one round trip."""

    async def close(self) -> None:
        """Let go of connections."""


def verifier_digest(instance_id: str) -> bytes:
    """A verifier's process, in few bytes."""
    return hashlib.blake2b(instance_id.encode(), digest_size=_VERIFIER_BYTES).digest()


def landmarks(num_blocks: int) -> Iterator[int]:
    """Numbers of first blocks that are noted and looked up: two per doubling, and all of them.

    So a long prompt has few keys, and of blocks that two prompts begin with alike at least two in three are found.
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
    """Looks up what others have noted, and writes own notes behind. The last to note a beginning wins."""

    def __init__(self, store: AffinityStore, counts: CacheCounts, namespace: CacheNamespace) -> None:
        """To be made, and closed, where an event loop runs."""
        self._store = store
        self._namespace = namespace
        # By salt and digest of the beginning, the verifier.
        self._notes: dict[tuple[str, bytes], bytes] = {}
        self._news = asyncio.Event()
        self._reads: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._run(), name="shared affinity")
        self.counts = counts

    def note(self, instance_id: str, salt: str, digests: Sequence[bytes]) -> None:
        """A verifier is given a sequence with these blocks; written soon, unless too many wait."""
        if len(self._notes) < _MOST_WAITING:
            verifier = verifier_digest(instance_id)
            self._notes.update(((salt, digests[number - 1]), verifier) for number in landmarks(len(digests)))
            self._news.set()

    async def look_up(self, salt: str, digests: Sequence[bytes], on_found: OnFound) -> None:
        """Ask who was given these blocks, and return when that is known or `WAIT_S` later; `on_found` may come then."""
        read = asyncio.create_task(self._read(TenantKeys(self._namespace, salt), digests, on_found))
        self._reads.add(read)
        read.add_done_callback(self._reads.discard)
        await asyncio.wait({read}, timeout=WAIT_S)

    async def close(self) -> None:
        """Let go of the store; what waits is not worth waiting for."""
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
                # A bug of ours must not be the end of all sharing.
                logger.exception("who was given which beginning could not be written")

    def _values(self, notes: Sequence[tuple[tuple[str, bytes], bytes]]) -> dict[bytes, bytes]:
        keys = {salt: TenantKeys(self._namespace, salt) for (salt, _), _ in notes}
        return {keys[salt].holder(digest): _HEAD + verifier for (salt, digest), verifier in notes}
