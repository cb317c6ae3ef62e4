"""Stores of this process, and when another is asked no longer."""

from __future__ import annotations

import random
from collections.abc import Sequence

from orchestrator.prefix_cache.redis_store import Breaker
from orchestrator.prefix_cache.store import MemoryStore, NearStore


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class FarStore(MemoryStore):
    """Counts its reads."""

    def __init__(self) -> None:
        super().__init__(1 << 20, 60.0)
        self.asked: list[list[bytes]] = []

    async def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self.asked.append(list(keys))
        return await super().read(keys)


async def test_memory_is_bounded_and_what_was_not_used_for_longest_goes_first() -> None:
    rng = random.Random(1)
    store = MemoryStore(max_bytes=10_000, ttl_s=60.0)
    await store.write({b"used": b"x" * 100})
    for number in range(200):
        await store.write({str(number).encode(): bytes(rng.randrange(500))})
        assert store.num_bytes <= 10_000
        assert await store.read([b"used"]) == [b"x" * 100]
    assert await store.read([b"0", b"199"]) != [None, None]
    assert (await store.read([b"0"])) == [None]


async def test_a_value_larger_than_the_memory_is_not_kept() -> None:
    store = MemoryStore(max_bytes=1000, ttl_s=60.0)
    await store.write({b"a": bytes(2000)})
    assert await store.read([b"a"]) == [None]
    assert store.num_bytes == 0


async def test_values_are_forgotten_after_their_time() -> None:
    clock = Clock()
    store = MemoryStore(1 << 20, ttl_s=10.0, clock=clock)
    await store.write({b"a": b"1"})
    clock.now_s += 9
    await store.write({b"b": b"2"})
    assert await store.read([b"a", b"b"]) == [b"1", b"2"]
    clock.now_s += 2
    assert await store.read([b"a", b"b"]) == [None, b"2"]


async def test_the_far_store_is_asked_once_for_what_is_not_near() -> None:
    far = FarStore()
    near = NearStore(MemoryStore(1 << 20, 60.0), far)
    await far.write({b"a": b"1", b"b": b"2"})
    assert await near.read([b"a", b"c", b"b"]) == [b"1", None, b"2"]
    assert await near.read([b"b", b"a"]) == [b"2", b"1"]
    assert far.asked == [[b"a", b"c", b"b"]]
    assert await near.replace({b"c": None}, {b"c": b"3"}) == []
    assert await near.read([b"c"]) == [b"3"]
    assert await far.read([b"c"]) == [b"3"]


async def test_what_others_have_changed_in_the_far_store_is_kept_and_read_from_there() -> None:
    far = FarStore()
    one, other = (NearStore(MemoryStore(1 << 20, 60.0), far) for _ in range(2))
    assert await one.read([b"a", b"b"]) == [None, None]
    assert await other.replace({b"a": None}, {b"a": b"1"}) == []
    assert await one.replace({b"a": None, b"b": None}, {b"a": b"2", b"b": b"3"}) == [b"a"]
    assert await one.read([b"a", b"b"]) == [b"1", b"3"]
    assert await one.replace({b"a": b"1"}, {b"a": b"4"}) == []
    # What is near may be old, but it never comes back.
    assert await other.read([b"a"]) == [b"1"]
    assert await other.replace({b"a": b"1"}, {b"a": b"5"}) == [b"a"]
    assert await other.read([b"a"]) == await far.read([b"a"]) == [b"4"]


def test_after_some_failures_nothing_is_asked_for_a_while_and_then_one_try_at_a_time() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    assert [breaker.failed() for _ in range(3)] == [False, False, True]
    assert not breaker.allows()
    clock.now_s += 1.0
    assert breaker.allows()
    assert not breaker.allows()
    assert not breaker.failed()
    clock.now_s += 1.9
    assert not breaker.allows()
    clock.now_s += 0.1
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.allows()
    assert breaker.allows()


def test_failures_with_successes_between_them_change_nothing() -> None:
    breaker = Breaker(Clock())
    for _ in range(10):
        assert not breaker.failed()
        assert not breaker.failed()
        breaker.succeeded()
        assert breaker.allows()


def test_calls_that_were_under_way_when_it_opened_do_not_lengthen_the_pause() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(20):
        breaker.failed()
    clock.now_s += 1.0
    assert breaker.allows()


def test_a_pause_has_an_end() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(3):
        breaker.failed()
    for _ in range(20):
        clock.now_s += 30.0
        assert breaker.allows()
        breaker.failed()
