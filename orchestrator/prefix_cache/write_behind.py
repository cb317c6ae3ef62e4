"""Asynchronous writes of finished outputs to the prefix cache: batched, in one task for all requests."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.prefix_cache.codec import (
    decode_continuations,
    decode_statistics,
    encode_continuations,
    encode_statistics,
)
from orchestrator.prefix_cache.keys import TenantKeys
from orchestrator.prefix_cache.recall import DEPTH, LOOK_BACK, anchors
from orchestrator.prefix_cache.store import CacheCounts, PrefixStore
from orchestrator.prefix_cache.values import MAX_DEPTH, Continuations, InvalidValueError, PrefixStatistics

logger = logging.getLogger(__name__)

# Seconds to collect outputs before a write, outputs per batch, and outputs that may wait.
_COLLECT_S = 0.05
_BATCH = 16
_MOST_WAITING = 256
# Keys per call of the store; larger calls would exceed their deadline.
_MOST_KEYS = 256
# Tokens remembered of an output, from its start.
_MOST_TOKENS = 4096

# Maps the previous value (None: missing) to the new one.
Change = Callable[[bytes | None], bytes]


@dataclass(frozen=True)
class Finished:
    """Finished output: all its tokens, prompt included, and its statistics."""

    keys: TenantKeys
    tokens: tuple[int, ...]
    num_prompt: int
    statistics: PrefixStatistics


class WriteBehind:
    """Writes queued outputs until closed."""

    def __init__(self, store: PrefixStore, counts: CacheCounts) -> None:
        self._store = store
        self._counts = counts
        self._waiting: deque[Finished] = deque()
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task = asyncio.create_task(self._run(), name="prefix cache")

    def put(self, finished: Finished) -> None:
        """Queue an output; if the queue is full, the oldest is dropped."""
        if len(self._waiting) >= _MOST_WAITING:
            self._waiting.popleft()
            self._counts.dropped_outputs += 1
            self._counts.unwritten_outputs -= 1
        self._waiting.append(finished)
        self._counts.unwritten_outputs += 1
        self._idle.clear()
        self._news.set()

    async def flushed(self) -> None:
        """Wait until every queued output has been written."""
        await self._idle.wait()

    async def close(self, timeout_s: float) -> None:
        """Write queued outputs for at most `timeout_s` seconds, then stop."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.flushed()
        except TimeoutError:
            logger.info("%d outputs were not written to the prefix cache", len(self._waiting))
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(_COLLECT_S)
            self._news.clear()
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
                try:
                    await self._write(batch)
                except Exception:
                    # A bug must not stop the writes.
                    logger.exception("outputs could not be written to the prefix cache")
                self._counts.unwritten_outputs -= len(batch)
            self._idle.set()

    async def _write(self, batch: Sequence[Finished]) -> None:
        changes: dict[bytes, list[Change]] = {}
        for finished in batch:
            for key, change in _changes(finished):
                changes.setdefault(key, []).append(change)
        keys = list(changes)
        for start in range(0, len(keys), _MOST_KEYS):
            part = keys[start : start + _MOST_KEYS]
            if changed := await self._change(part, changes):
                self._counts.conflicts += len(changed)
                # One retry: others write in batches too and have hardly written again.
                lost = await self._change(changed, changes)
                self._counts.lost_changes += len(lost)

    async def _change(self, keys: Sequence[bytes], changes: Mapping[bytes, Sequence[Change]]) -> list[bytes]:
        """Apply changes in two round trips; returns the keys whose values have changed in between."""
        before = dict(zip(keys, await self._store.read(keys), strict=True))
        after: dict[bytes, bytes] = {}
        for key in keys:
            after[key] = changes[key][0](before[key])
            for change in changes[key][1:]:
                after[key] = change(after[key])
            # Yield to the event loop between keys.
            await asyncio.sleep(0)
        return await self._store.replace(before, after)


def _changes(finished: Finished) -> Iterator[tuple[bytes, Change]]:
    tokens, start, keys = finished.tokens[: finished.num_prompt + _MOST_TOKENS], finished.num_prompt, finished.keys
    if start < len(tokens):
        yield keys.prompt(tokens[:start]), _followed(tokens[start : start + MAX_DEPTH])
        # The prompt's end is stored like an anchor, once.
        ends = {start, *anchors(tokens, max(0, start - LOOK_BACK), len(tokens))}
        for end in sorted(ends):
            yield keys.suffix(tokens, end), _followed(tokens[end : end + DEPTH])
    if finished.statistics.rounds:
        yield keys.beginning(tokens[:start]), _counted(finished.statistics)


def _followed(path: Sequence[int]) -> Change:
    def change(before: bytes | None) -> bytes:
        return encode_continuations(_tree(before).with_path(path))

    return change


def _counted(statistics: PrefixStatistics) -> Change:
    def change(before: bytes | None) -> bytes:
        return encode_statistics(_statistics(before).plus(statistics))

    return change


def _tree(value: bytes | None) -> Continuations:
    try:
        return Continuations() if value is None else decode_continuations(value)
    except InvalidValueError:
        return Continuations()


def _statistics(value: bytes | None) -> PrefixStatistics:
    try:
        return PrefixStatistics() if value is None else decode_statistics(value)
    except InvalidValueError:
        return PrefixStatistics()
