"""From a finished output to what the next request is told: written in batches, read at anchors."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

import pytest

from orchestrator.prefix_cache.cache import PrefixCache
from orchestrator.prefix_cache.codec import (
    decode_continuations,
    decode_statistics,
    encode_continuations,
    encode_statistics,
)
from orchestrator.prefix_cache.keys import SUFFIX_TOKENS, CacheNamespace, TenantKeys
from orchestrator.prefix_cache.recall import DEPTH, SPACING, Recall, anchors
from orchestrator.prefix_cache.store import CacheCounts, MemoryStore
from orchestrator.prefix_cache.values import Continuations, PrefixStatistics
from orchestrator.prefix_cache.write_behind import Finished, WriteBehind
from orchestrator.request.statistics import DraftGain, Statistics
from tests.fakes import eventually

REALM = CacheNamespace(b"secret", "model", "fingerprint")
KEYS = TenantKeys(REALM, "tenant")
VOCAB = 1000


class Store(MemoryStore):
    """Counts round trips, and answers when it is let."""

    def __init__(self) -> None:
        super().__init__(1 << 20, 60.0)
        self.reads: list[list[bytes]] = []
        self.writes: list[dict[bytes, bytes]] = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self.reads.append(list(keys))
        if not self.answers.is_set():
            await self.answers.wait()
        return await super().read(keys)

    async def write(self, values: Mapping[bytes, bytes]) -> None:
        self.writes.append(dict(values))
        await super().write(values)


class Request:
    """Reads as a request does, and keeps what it is told."""

    def __init__(self, store: Store, counts: CacheCounts | None = None) -> None:
        self.told: list[tuple[int, ...]] = []
        self.statistics: list[PrefixStatistics] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.counts = counts or CacheCounts()
        self.recall = Recall(store, KEYS, self.counts, VOCAB, self.tasks, self.take)

    def take(self, sequences: Iterable[tuple[int, ...]], statistics: PrefixStatistics) -> None:
        self.told += sequences
        self.statistics.append(statistics)


@pytest.fixture
async def store() -> Store:
    return Store()


@pytest.fixture
async def writing(store: Store) -> AsyncIterator[WriteBehind]:
    write_behind = WriteBehind(store, CacheCounts())
    yield write_behind
    await write_behind.close(1.0)


def text(seed: int, size: int = 200) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB) for _ in range(size))


def finished(tokens: tuple[int, ...], num_prompt: int = 50) -> Finished:
    return Finished(KEYS, tokens, num_prompt, PrefixStatistics(10, 30, 5, 6000))


def test_anchors_belong_to_the_text_and_are_as_dense_as_they_should_be() -> None:
    before, after = text(1, 30), text(2, 5000)
    here = list(anchors(after, SUFFIX_TOKENS, len(after) + 1))
    there = [end - len(before) for end in anchors([*before, *after], len(before) + SUFFIX_TOKENS, 10**4 // 2)]
    assert here[: len(there)] == there
    assert len(after) / SPACING * 0.8 < len(here) < len(after) / SPACING * 1.25


@pytest.mark.parametrize("seed", range(5))
async def test_a_prompt_that_comes_again_is_told_what_followed_in_one_round_trip(
    store: Store, writing: WriteBehind, seed: int
) -> None:
    tokens = text(seed)
    writing.put(finished(tokens))
    await writing.flushed()
    assert len(store.writes) == 1
    store.reads.clear()
    request = Request(store)
    request.recall.begin(tokens[:50], 50)
    assert len(store.reads) == 1
    assert all(KEYS.suffix(tokens, end) in store.writes[0] for end in anchors(tokens, 50, 200))
    # The likeliest last: what followed the whole prompt.
    assert request.told[-1] == tokens[50 - SUFFIX_TOKENS : 50 + 64]
    assert request.recall.knows_prompt
    assert request.statistics == [PrefixStatistics(10, 30, 5, 6000)]


async def test_what_lies_ahead_is_always_known_when_an_output_comes_again(store: Store, writing: WriteBehind) -> None:
    tokens = text(7, 400)
    writing.put(finished(tokens))
    await writing.flushed()
    request = Request(store)
    request.recall.begin(tokens[:50], 50)
    uncovered = 0
    for length in range(51, 390):
        request.recall.advance(tokens[:length])
        ahead = tokens[length - 2 : length + 4]
        uncovered += not any(_contains(sequence, ahead) for sequence in request.told)
    assert uncovered < 10


async def test_a_text_that_is_met_in_another_place_is_told_what_followed(store: Store, writing: WriteBehind) -> None:
    tokens = text(3)
    writing.put(finished(tokens))
    await writing.flushed()
    request = Request(store)
    elsewhere = [*text(4, 70), *tokens[100:140]]
    request.recall.begin(elsewhere, len(elsewhere))
    assert any(_contains(sequence, tokens[138:146]) for sequence in request.told)
    # The end of this prompt is remembered, and not all of it.
    assert not request.recall.knows_prompt


def _contains(sequence: Sequence[int], part: Sequence[int]) -> bool:
    return any(tuple(sequence[at : at + len(part)]) == tuple(part) for at in range(len(sequence)))


async def test_one_read_at_a_time_is_under_way_and_what_came_meanwhile_is_asked_together(store: Store) -> None:
    tokens = text(5)
    store.answers.clear()
    request = Request(store)
    request.recall.begin(tokens[:50], 50)
    for length in range(51, 120):
        request.recall.advance(tokens[:length])
    assert len(store.reads) == 1
    store.answers.set()
    await asyncio.gather(*request.tasks)
    request.recall.advance(tokens[:120])
    assert len(store.reads) == 2
    assert set(store.reads[1]) == {KEYS.suffix(tokens, end) for end in anchors(tokens, 51, 121)}


async def test_nothing_is_asked_twice_and_a_closed_request_is_told_nothing(store: Store) -> None:
    tokens = (1, 2, 3, 4) * 50
    request = Request(store)
    request.recall.begin(tokens[:50], 50)
    for length in range(51, 200):
        request.recall.advance(tokens[:length])
    asked = [key for keys in store.reads for key in keys]
    assert len(asked) == len(set(asked))
    await store.write({KEYS.prompt(tokens[:9]): encode_continuations(Continuations().with_path([1]))})
    store.answers.clear()
    other = Request(store)
    other.recall.begin(tokens[:9], 9)
    other.recall.close()
    store.answers.set()
    await asyncio.gather(*other.tasks)
    assert not other.told


async def test_garbage_and_tokens_outside_the_vocabulary_are_counted_and_not_told(store: Store) -> None:
    tokens = text(6, 50)
    await store.write(
        {
            KEYS.prompt(tokens): encode_continuations(Continuations().with_path([VOCAB])),
            KEYS.suffix(tokens, 50): b"\x01garbage",
            KEYS.beginning(tokens): b"garbage, too",
        }
    )
    request = Request(store)
    request.recall.begin(tokens, 50)
    assert request.told == []
    assert request.counts.invalid_values == 3
    assert request.counts.hits == 0


async def test_outputs_that_end_together_are_written_together_and_counted_each(store: Store) -> None:
    counts = CacheCounts()
    writing = WriteBehind(store, counts)
    for _ in range(3):
        writing.put(finished(text(8)))
    await writing.flushed()
    await writing.close(1.0)
    assert len(store.reads) == len(store.writes) == 1
    statistics = decode_statistics(store.writes[0][KEYS.beginning(text(8))])
    assert statistics == PrefixStatistics(30, 90, 15, 18000)


@pytest.mark.parametrize("num_writers", [2, 5])
async def test_outputs_that_several_write_at_once_are_all_counted_or_known_to_be_lost(
    store: Store, num_writers: int
) -> None:
    counts = CacheCounts()
    writers = [WriteBehind(store, counts) for _ in range(num_writers)]
    store.answers.clear()
    for writer in writers:
        writer.put(finished(text(8)))
    await eventually(lambda: len(store.reads) == num_writers)
    # All have read the same, and the first to write wins, here and when the others try again.
    store.answers.set()
    for writer in writers:
        await writer.flushed()
        await writer.close(1.0)
    [value] = await store.read([KEYS.beginning(text(8))])
    assert value is not None
    [tree] = await store.read([KEYS.prompt(text(8)[:50])])
    assert tree is not None
    num_keys = len({key for keys in store.reads for key in keys})
    num_lost = counts.lost_changes / num_keys
    assert counts.conflicts >= num_writers - 1
    assert num_lost == num_writers - 2
    assert decode_statistics(value).rounds == 10 * (num_writers - num_lost)
    assert decode_continuations(tree).counts[0] == num_writers - num_lost


async def test_a_long_output_is_written_in_calls_that_are_not_too_large(store: Store, writing: WriteBehind) -> None:
    tokens = text(10, 5000)
    writing.put(finished(tokens))
    await writing.flushed()
    ends = list(anchors(tokens, 50, 4000))
    assert max(map(len, store.reads)) <= 256 < len(ends)
    assert max(map(len, store.writes)) <= 256
    assert set().union(*store.writes) >= {KEYS.suffix(tokens, end) for end in ends}


async def test_what_comes_faster_than_it_can_be_written_is_dropped_and_counted(store: Store) -> None:
    counts = CacheCounts()
    writing = WriteBehind(store, counts)
    for seed in range(300):
        writing.put(finished(text(seed, 52)))
    await writing.flushed()
    await writing.close(1.0)
    assert counts.dropped_outputs == 300 - 256
    assert sum(KEYS.prompt(text(seed, 52)[:50]) in written for written in store.writes for seed in range(300)) == 256


async def test_garbage_is_replaced_by_what_is_seen(store: Store, writing: WriteBehind) -> None:
    tokens = text(9)
    await store.write({KEYS.prompt(tokens[:50]): b"garbage", KEYS.beginning(tokens[:50]): b"garbage"})
    writing.put(finished(tokens))
    await writing.flushed()
    request = Request(store)
    request.recall.begin(tokens[:50], 50)
    assert request.told
    assert request.counts.invalid_values == 0


async def test_a_requests_own_text_may_be_left_to_the_verifier(store: Store) -> None:
    cache = PrefixCache(store, CacheCounts(), REALM, VOCAB)
    prompt = [1, 2, 3, 4, 5] * 10
    tokens = list(prompt)
    looks = cache.drafter("tenant", tokens, len(prompt), sampled=False, drafts_own=True)
    leaves = cache.drafter("tenant", tokens, len(prompt), sampled=False, drafts_own=False)
    for drafter in (looks, leaves):
        drafter.begin()
    assert looks.draft(8, 1).token_ids[:3] == (1, 2, 3)
    assert not len(leaves.draft(8, 1))
    tokens += text(3, 100)
    leaves.close(Statistics(rounds=20))
    await cache.flushed()
    # What other requests said is still here.
    tokens = list(prompt)
    second = cache.drafter("tenant", tokens, len(prompt), sampled=False, drafts_own=False)
    second.begin()
    await eventually(lambda: len(second.draft(8, 1)) > 0)
    assert second.draft(8, 1).token_ids[:3] == tuple(text(3, 100)[:3])
    looks.close(None)
    await cache.close()


async def test_closing_does_not_wait_for_a_store_that_does_not_answer(store: Store) -> None:
    store.answers.clear()
    counts = CacheCounts()
    cache = PrefixCache(store, counts, REALM, VOCAB)
    tokens = list(text(1, 60))
    drafter = cache.drafter("", tokens, 50, sampled=False, drafts_own=True)
    drafter.begin()
    drafter.close(Statistics(rounds=10))
    async with asyncio.timeout(5):
        await cache.close()


async def test_what_drafts_have_gained_is_told_once_to_a_request_with_the_same_beginning(store: Store) -> None:
    cache = PrefixCache(store, CacheCounts(), REALM, VOCAB)
    prompt = [1, 2, 3, 4, 5] * 10
    tokens = list(prompt)
    first = cache.drafter("tenant", tokens, len(prompt), sampled=False, drafts_own=True)
    told: list[DraftGain] = []
    first.on_gain = told.append
    first.begin()
    tokens += text(3, 100)
    first.close(Statistics(rounds=20, accepted_tokens=80), DraftGain(16, 24.0))
    await cache.flushed()
    assert not told
    store.answers.clear()
    tokens = list(prompt)
    second = cache.drafter("tenant", tokens, len(prompt), sampled=False, drafts_own=True)
    second.on_gain = told.append
    second.begin()
    # Not while it began: the answer is late, and nobody waits for it.
    assert not told
    store.answers.set()
    await eventually(lambda: bool(told))
    for token in text(3, 100):
        tokens.append(token)
        second.commit([token])
    assert told == [DraftGain(16, 24.0)]
    await cache.close()


@pytest.mark.parametrize(("hits", "is_better"), [(0, False), (200, True)])
async def test_what_a_prompts_beginning_has_shown_moves_the_first_draft(
    store: Store, hits: int, is_better: bool
) -> None:
    cache = PrefixCache(store, CacheCounts(), REALM, VOCAB)
    prompt = [1, 2, 3, 4, 5] * 10

    def first_draft() -> float:
        drafter = cache.drafter("tenant", prompt, len(prompt), sampled=False, drafts_own=True)
        drafter.begin()
        return drafter.draft(1, batch_size=1).log_probs[0]

    unknown = first_draft()
    await store.write({KEYS.beginning(prompt): encode_statistics(PrefixStatistics(50, 150, hits, 100_000))})
    assert (first_draft() > unknown) == is_better
    await cache.close()


def test_statistics_add_up_and_fade() -> None:
    one = PrefixStatistics(10, 40, 3, 4000, asked_rounds=8, gain_milli=4000)
    other = PrefixStatistics(1, 2, 1, 500, 1, 500)
    both = one.plus(other)
    assert both.gain == DraftGain(9, 4.5)
    assert (both.rounds, both.tokens, both.guess_hits, both.guess_expectation_milli) == (11, 42, 4, 4500)
    total = PrefixStatistics()
    for _ in range(5000):
        total = total.plus(one)
    assert total.tokens < 1 << 17
    assert total.tokens / total.rounds == pytest.approx(4.0, abs=0.1)
    assert total.gain.total / total.gain.rounds == pytest.approx(0.5, abs=0.01)


def test_what_is_remembered_behind_an_anchor_reaches_over_several() -> None:
    assert DEPTH >= 4 * SPACING
