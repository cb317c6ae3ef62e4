"""Planners' knowledge of verifiers, kept in Redis, with which a new orchestrator begins."""

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

# The longest that a call may take, where REDIS_TIMEOUT_MS is not longer: the start of the orchestrator waits for one.
TIMEOUT_S = 0.25
# Time between two writes, and the passes of its own that a planner has to have seen before anything is written.
WRITE_EVERY_S = 30.0
LEAST_PASSES = 64


class KnowledgeStore(Protocol):
    """Remembers bytes for a while. Every call has a deadline; what goes wrong looks like something forgotten."""

    async def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of keys, in their order; None for what is not there."""

    async def write(self, values: Mapping[bytes, bytes], ttl_s: float) -> None:
        """Remember values for so long."""

    async def close(self) -> None:
        """Let go of connections."""


@dataclass
class PlannerSnapshotTarget:
    """A planner, and where knowledge of its verifier is kept: that depends on what drafters are there at the time."""

    planner: AdaptivePlanner
    key: Callable[[], bytes]
    # Passes when it was written last.
    num_written: int = 0


class SharedKnowledge:
    """Reads once, and writes behind, one call for all planners each time.

    The last to write wins: values are means, not sums, and everybody's hold what they began with.
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
        """Let planners begin with what is known, if the store tells it in time, and write what they learn from now on.

        To be awaited before the first request.
        """
        self.counts.reads += 1
        values = await self._store.read([target.key() for target in self._targets])
        for target, value in zip(self._targets, values, strict=True):
            self._teach(target, value)
        self._task = asyncio.create_task(self._run(), name="shared knowledge")

    async def close(self) -> None:
        """Write for the last time, and let go of the store."""
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
            logger.warning("what is kept of a planner's knowledge is none: %s", error)
            return
        self.counts.hits += 1
        logger.info("a planner begins with what others have learned")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._write_every_s)
            await self._write()

    async def _write(self) -> None:
        try:
            await self._write_news()
        except Exception:
            # A bug of ours must be the end neither of all sharing nor of an orderly stop.
            logger.exception("what planners have learned could not be written")

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
