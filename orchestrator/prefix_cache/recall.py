"""Reads of the prefix cache for one request: at its start and at anchors, never waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from coppice.net.first_step import start_now
from orchestrator.prefix_cache.codec import decode_continuations, decode_statistics
from orchestrator.prefix_cache.keys import SUFFIX_TOKENS, TenantKeys
from orchestrator.prefix_cache.store import CacheCounts, PrefixStore
from orchestrator.prefix_cache.values import Continuations, InvalidValueError, PrefixStatistics

# Anchors are the positions at which continuations are stored. The tokens there choose them (content-defined), so a text
# has the same anchors wherever it occurs. One position in SPACING is an anchor on average.
SPACING = 8
# Tokens stored after an anchor: several spacings, to bridge the time until the next read.
DEPTH = 48
# Distance before a prompt's end in which anchors are used: their continuations reach beyond the prompt.
LOOK_BACK = 32
# Most anchors per read; the latest are used.
MAX_ANCHORS = 16

# Called with sequences (context and continuation, likeliest last) and statistics of the prompt's beginning.
OnRecalled: TypeAlias = Callable[[Iterable[tuple[int, ...]], PrefixStatistics], None]


def anchors(tokens: Sequence[int], start: int, stop: int) -> Iterator[int]:
    """Positions in [start, stop) that are anchors, with enough tokens before them for a key."""
    for position in range(max(start, SUFFIX_TOKENS), stop):
        mixed = (tokens[position - 2] * 0x9E3779B1 + tokens[position - 1] * 0x85EBCA6B) & 0xFFFFFFFF
        if (mixed >> 15) % SPACING == 0:
            yield position


class Recall:
    """Reads for one request, one round trip at a time; results go to `on_recalled`."""

    def __init__(
        self,
        store: PrefixStore,
        keys: TenantKeys,
        counts: CacheCounts,
        vocab_size: int,
        tasks: set[asyncio.Task[None]],
        on_recalled: OnRecalled,
    ) -> None:
        """`tasks` keeps references to reads under way."""
        self._store = store
        self._keys = keys
        self._counts = counts
        self._vocab_size = vocab_size
        self._tasks = tasks
        self._on_recalled = on_recalled
        self._is_reading = False
        self._num_seen = 0
        self._waiting: dict[bytes, tuple[int, ...]] = {}
        self._asked: set[bytes] = set()
        self._closed = False
        self._statistics = PrefixStatistics()
        self._prompt: bytes | None = None
        # Whether a continuation of the whole prompt was found.
        self.knows_prompt = False

    def begin(self, tokens: Sequence[int], num_prompt: int) -> None:
        """Request continuations of the prompt, of its end and of the anchors shortly before."""
        self._num_seen = max(0, len(tokens) - LOOK_BACK)
        if len(tokens) == num_prompt:
            self._prompt = self._keys.prompt(tokens)
            self._want(self._prompt, tokens, num_prompt)
        self._want(self._keys.suffix(tokens, len(tokens)), tokens, len(tokens))
        self._want_anchors(tokens)
        self._read(self._keys.beginning(tokens[:num_prompt]))

    def advance(self, tokens: Sequence[int]) -> None:
        """Request continuations of the anchors among newly committed tokens."""
        self._want_anchors(tokens)
        self._read()

    def close(self) -> None:
        """Ignore reads under way."""
        self._closed = True

    def _want_anchors(self, tokens: Sequence[int]) -> None:
        # Including the position after the last token, the most useful one.
        for end in list(anchors(tokens, self._num_seen, len(tokens) + 1))[-MAX_ANCHORS:]:
            self._want(self._keys.suffix(tokens, end), tokens, end)
        self._num_seen = len(tokens) + 1

    def _want(self, key: bytes, tokens: Sequence[int], end: int) -> None:
        if key not in self._asked:
            self._asked.add(key)
            self._waiting[key] = tuple(tokens[max(0, end - SUFFIX_TOKENS) : end])

    def _read(self, beginning: bytes | None = None) -> None:
        if self._is_reading or not self._waiting:
            return
        task = start_now(self._ask(beginning))
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _ask(self, beginning: bytes | None) -> None:
        wanted, self._waiting = self._waiting, {}
        names = [*wanted] if beginning is None else [*wanted, beginning]
        self._is_reading = True
        self._counts.reads += 1
        values = await self._store.read(names)
        self._is_reading = False
        if self._closed:
            return
        if beginning is not None and (value := values.pop()) is not None:
            self._take_statistics(value)
        # Reversed: the first key, that of the whole prompt, is the most specific, and its continuation comes last.
        found = {key: self._continuations(value) for key, value in zip(wanted, values, strict=True)}
        self.knows_prompt = self.knows_prompt or bool(self._prompt in found and found[self._prompt].token_ids)
        sequences = [wanted[key] + path for key in reversed(found) for path in found[key].paths()]
        if sequences or beginning is not None:
            self._on_recalled(sequences, self._statistics)

    def _continuations(self, value: bytes | None) -> Continuations:
        if value is None:
            self._counts.misses += 1
            return Continuations()
        try:
            tree = decode_continuations(value)
            if max(tree.token_ids, default=0) >= self._vocab_size:
                raise InvalidValueError("a token outside the vocabulary")
        except InvalidValueError:
            self._counts.invalid_values += 1
            return Continuations()
        self._counts.hits += 1
        return tree

    def _take_statistics(self, value: bytes) -> None:
        try:
            self._statistics = decode_statistics(value)
        except InvalidValueError:
            self._counts.invalid_values += 1
