"""Planners' learned state in Redis, from which new orchestrators start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.planner.adaptive import AdaptivePlanner
from orchestrator.planner.knowledge import decode_knowledge, encode_knowledge
from orchestrator.prefix_cache.store import CacheCounts

logger = logging.getLogger(__name__)

# Least timeout of a call, besides REDIS_TIMEOUT_MS: the orchestrator's start waits for one.
TIMEOUT_S = 0.25
# Interval of writes, and least passes of a planner since its last write.
WRITE_EVERY_S = 30.0
LEAST_PASSES = 64


class KnowledgeStore(Protocol):
    """Key-value store with expiry. Calls have a deadline; failures look like missing keys."""

    async def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values of keys, in order; None for missing ones."""

    async def write(self, values: Mapping[bytes, bytes], ttl_s: float) -> None:
        """Store values for `ttl_s` seconds."""

    async def close(self) -> None:
        """Close connections."""


@dataclass
class PlannerSnapshotTarget:
    """A planner, and the key of its verifier's state, which depends on the drafters connected at the time."""

    planner: AdaptivePlanner
    key: Callable[[], bytes]
    # Pass number at the last write.
    num_written: int = 0


class SharedKnowledge:
    """Reads at start and writes periodically, one call for all planners each time.

    The last write wins: values are means, not sums, and include what each planner started from.
    """

    def __init__(
        self,
        store: KnowledgeStore,
        counts: CacheCounts,
        targets: Sequence[PlannerSnapshotTarget],
        ttl_s: float,
        write_every_s: float = WRITE_EVERY_S,
    ) -> None:
        self._store = store
        self._targets = tuple(targets)
        self._ttl_s = ttl_s
        self._write_every_s = write_every_s
        self._task: asyncio.Task[None] | None = None
        self.counts = counts

    async def start(self) -> None:
        """Start planners from stored state, if it comes in time, and begin periodic writes.

        To be awaited before the first request.
        """
        self.counts.reads += 1
        values = await self._store.read([target.key() for target in self._targets])
        for target, value in zip(self._targets, values, strict=True):
            self._teach(target, value)
        self._task = asyncio.create_task(self._run(), name="shared knowledge")

    async def close(self) -> None:
        """Write a last time, and close the store."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._write()
        await self._store.close()

    def _teach(self, target: PlannerSnapshotTarget, value: bytes | None) -> None:
        if value is None:
            self.counts.misses += 1
            return
        try:
            target.planner.begin_with(decode_knowledge(value))
        except ValueError as error:
            self.counts.invalid_values += 1
            logger.warning("stored planner state is invalid: %s", error)
            return
        self.counts.hits += 1
        logger.info("planner starts from stored state")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._write_every_s)
            await self._write()

    async def _write(self) -> None:
        try:
            await self._write_news()
        except Exception:
            # A bug must end neither sharing nor an orderly stop.
            logger.exception("planner state could not be written")

    async def _write_news(self) -> None:
        values: dict[bytes, bytes] = {}
        for target in self._targets:
            num_passes = target.planner.pass_number
            knowledge = target.planner.knowledge() if num_passes >= target.num_written + LEAST_PASSES else None
            if knowledge is not None:
                values[target.key()] = encode_knowledge(knowledge)
                target.num_written = num_passes
        if values:
            await self._store.write(values, self._ttl_s)
