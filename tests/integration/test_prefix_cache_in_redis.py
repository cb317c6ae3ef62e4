"""The prefix cache in a real Redis: shared by orchestrators, and whatever happens to it fails no request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from coppice.client import Client, Options
from coppice.completion import Completion
from orchestrator.app import Orchestrator
from orchestrator.prefix_cache.cache import PrefixCache
from orchestrator.prefix_cache.redis_store import RedisStore
from orchestrator.prefix_cache.store import CacheCounts
from tests.conftest import orchestrator_on_fakes
from tests.fakes import FakeVerifier
from tests.redis_server import RedisServer, SlowProxy, needs_redis, redis_server
from tests.toy_target import babble, plain

pytestmark = needs_redis

PROMPT = "def a prompt that is long enough: "
OPTIONS = Options(max_tokens=64, seed=5, ignore_eos=True)
EXPECTED = tuple(plain(babble, list(PROMPT.encode()), 64, 5))
# Room for a machine that is busy with other things: what is slow on purpose is slower than this.
PATIENT_MS = 5000.0


@pytest.fixture
async def redis() -> AsyncIterator[RedisServer]:
    async with redis_server() as server:
        yield server


@contextlib.asynccontextmanager
async def orchestrator(url: str, **settings: Any) -> AsyncIterator[tuple[Client, PrefixCache]]:
    """One with a prefix cache in Redis, in front of a verifier of its own."""
    chosen = {"cache_secret": "of all", "redis_timeout_ms": PATIENT_MS, **settings}
    verifier = FakeVerifier(pass_s=0.003, reroots=True)
    async with orchestrator_on_fakes(verifier, cache_drafter=True, redis_url=url, **chosen) as (client, running):
        yield client, _cache(running)


def _cache(running: Orchestrator) -> PrefixCache:
    assert running.cache is not None
    return running.cache


async def answered(client: Client, cache: PrefixCache, options: Options = OPTIONS) -> Completion:
    """A completion, and then all that it leaves behind."""
    completion = await client.generate(PROMPT, options)
    assert completion.token_ids == EXPECTED
    await cache.flushed()
    return completion


async def test_a_second_orchestrator_is_warm_from_the_first_request_on(redis: RedisServer) -> None:
    async with orchestrator(redis.url) as (client, cache):
        cold = await answered(client, cache)
        assert (cache.counts.errors, cache.counts.skipped, cache.counts.hits) == (0, 0, 0)
    async with orchestrator(redis.url) as (client, cache):
        warm = await answered(client, cache)
        assert cache.counts.hits > 0
        # One read when it begins, and some at anchors; far fewer than rounds of the cold request.
        assert cache.counts.reads < cold.speculation.rounds / 2
    assert warm.speculation.rounds < cold.speculation.rounds / 2


@pytest.mark.parametrize(("secret", "salt"), [("of another", ""), ("of all", "of another")])
async def test_other_secrets_and_other_tenants_find_nothing(redis: RedisServer, secret: str, salt: str) -> None:
    async with orchestrator(redis.url) as (client, cache):
        await answered(client, cache)
    async with orchestrator(redis.url, cache_secret=secret) as (client, cache):
        await answered(client, cache, replace(OPTIONS, cache_salt=salt))
        assert cache.counts.hits == 0
        assert cache.counts.misses > 0


async def test_what_is_remembered_dies_with_its_time_and_does_not_show_the_prompt(redis: RedisServer) -> None:
    async with orchestrator(redis.url, cache_ttl_s=1000.0) as (client, cache):
        await answered(client, cache)
    async with redis.client() as client:
        keys = await client.keys("*")
        assert keys
        for key in keys:
            assert 0 < await client.pttl(key) <= 1_000_000
            value = await client.get(key)
            assert b"prompt" not in key + value
            assert len(value) < 600


async def test_redis_killed_in_the_middle_fails_no_request_and_is_used_again_when_it_is_back(
    redis: RedisServer,
) -> None:
    async with orchestrator(redis.url) as (client, cache):
        await answered(client, cache)
        tenants = [replace(OPTIONS, cache_salt=f"tenant {number}") for number in range(8)]
        running = [asyncio.create_task(client.generate(PROMPT, options)) for options in tenants]
        await asyncio.sleep(0.05)
        await redis.kill()
        assert [completion.token_ids for completion in await asyncio.gather(*running)] == [EXPECTED] * 8
        for options in tenants:
            await answered(client, cache, options)
        assert cache.counts.errors >= 3
        # Whom nobody answers nobody asks: far fewer errors than reads.
        assert cache.counts.skipped > 0
        await redis.start()
        async with asyncio.timeout(20), redis.client() as own:
            number = 0
            while not await own.dbsize():
                number += 1
                await answered(client, cache, replace(OPTIONS, cache_salt=f"later {number}"))


async def test_an_absent_redis_fails_no_request() -> None:
    async with orchestrator("redis://127.0.0.1:1/0") as (client, cache):
        cold = await answered(client, cache)
        # The near store remembers all the same.
        warm = await answered(client, cache)
    assert warm.speculation.rounds < cold.speculation.rounds / 2
    assert cache.counts.errors > 0


async def test_no_round_waits_for_a_slow_redis(redis: RedisServer) -> None:
    """Every answer comes long after the request has ended, and before its deadline."""
    async with (
        SlowProxy(redis.port, delay_s=3.0).running() as proxy,
        orchestrator(proxy.url, redis_timeout_ms=8000.0) as (client, cache),
    ):
        completion = await client.generate(PROMPT, OPTIONS)
        assert completion.token_ids == EXPECTED
        # Connecting alone takes longer than the whole request: nothing was known by its end.
        assert cache.counts.hits + cache.counts.misses == 0
        assert cache.counts.reads == 1
        assert completion.timing.total_ms < 3000
        assert completion.speculation.rounds > 0
        assert proxy.num_connections > 0


async def test_a_redis_50_ms_away_costs_no_request_a_wait(redis: RedisServer) -> None:
    """Of requests through it and of others, by turns, the fastest differ by less than half of one of its answers."""
    delay_ms, fastest_ms = 50.0, [float("inf")] * 2
    salts = [f"tenant {number}" for number in range(30)]
    async with SlowProxy(redis.port, delay_s=delay_ms / 1000).running() as proxy:
        async with orchestrator(redis.url) as near, orchestrator(proxy.url) as far:
            # Each is cold to each tenant of its own.
            for number, salt in enumerate(salts):
                for place, (client, cache) in enumerate((near, far)):
                    begun_s = time.monotonic()
                    completion = await client.generate(PROMPT, replace(OPTIONS, cache_salt=f"{place} of {salt}"))
                    fastest_ms[place] = min(fastest_ms[place], 1000 * (time.monotonic() - begun_s))
                    assert completion.token_ids == EXPECTED
                    await cache.flushed()
                # More turns only where others take the machine.
                if number >= 4 and fastest_ms[1] - fastest_ms[0] < delay_ms / 2:
                    break
            assert far[1].counts.reads > 0
        # Its answers come in time for the later rounds of a request all the same.
        async with orchestrator(proxy.url) as (client, cache):
            for salt in salts[:3]:
                await answered(client, cache, replace(OPTIONS, cache_salt=f"1 of {salt}"))
            assert cache.counts.hits > 0
            assert (cache.counts.errors, cache.counts.skipped) == (0, 0)
    assert fastest_ms[1] - fastest_ms[0] < delay_ms / 2


async def test_a_redis_that_is_too_slow_is_left_alone(redis: RedisServer) -> None:
    async with (
        SlowProxy(redis.port, delay_s=0.2).running() as proxy,
        orchestrator(proxy.url, redis_timeout_ms=20.0) as (client, cache),
    ):
        for number in range(8):
            await answered(client, cache, replace(OPTIONS, cache_salt=str(number)))
        assert cache.counts.hits == 0
        assert 3 <= cache.counts.errors < cache.counts.skipped
        assert proxy.num_connections <= cache.counts.errors


async def test_a_full_redis_is_still_read(redis: RedisServer) -> None:
    async with orchestrator(redis.url) as (client, cache):
        cold = await answered(client, cache)
    async with redis.client() as own:
        await own.config_set("maxmemory-policy", "noeviction")
        await own.config_set("maxmemory", "1")
        size = await own.dbsize()
        async with orchestrator(redis.url) as (client, cache):
            warm = await answered(client, cache)
            for number in range(4):
                await answered(client, cache, replace(OPTIONS, cache_salt=str(number)))
            assert cache.counts.errors >= 3
            # Reading goes on: each of these requests is told that there is nothing.
            before = cache.counts.misses
            await answered(client, cache, replace(OPTIONS, cache_salt="another"))
            assert cache.counts.misses > before
        assert await own.dbsize() == size
    assert warm.speculation.rounds < cold.speculation.rounds / 2


async def test_wrong_types_and_garbage_are_misses_and_are_counted_and_replaced(redis: RedisServer) -> None:
    async with orchestrator(redis.url) as (client, cache):
        cold = await answered(client, cache)
    async with redis.client() as own:
        for number, key in enumerate(sorted(await own.keys("*"))):
            if number % 2:
                await own.set(key, b"\x01\x01garbage")
            else:
                await own.delete(key)
                await own.lpush(key, "not a string")
    async with orchestrator(redis.url) as (client, cache):
        spoilt = await answered(client, cache)
        assert cache.counts.hits == 0
        assert cache.counts.misses > 0
        assert cache.counts.invalid_values > 0
    async with orchestrator(redis.url) as (client, cache):
        warm = await answered(client, cache)
    assert abs(spoilt.speculation.rounds - cold.speculation.rounds) < 5
    assert warm.speculation.rounds < cold.speculation.rounds / 2


async def test_no_count_is_lost_where_many_change_the_same_values_at_once(redis: RedisServer) -> None:
    """Each of several stores adds to the same numbers, in turns of the event loop that are as mixed as they come."""
    counts = CacheCounts()
    keys = [b"first", b"second", b"third"]
    conflicts = 0

    async def add(store: RedisStore, times: int) -> None:
        nonlocal conflicts
        for _ in range(times):
            left = keys
            while left:
                before = dict(zip(left, await store.read(left), strict=True))
                after = {key: str(int(value or b"0") + 1).encode() for key, value in before.items()}
                left = await store.replace(before, after)
                conflicts += len(left)

    stores = [RedisStore.open(redis.url, ttl_s=1000.0, timeout_s=5.0, counts=counts) for _ in range(4)]
    await asyncio.gather(*[add(store, 25) for store in stores])
    assert await stores[0].read(keys) == [b"100"] * 3
    assert conflicts > 0
    for store in stores:
        await store.close()
    assert (counts.errors, counts.skipped) == (0, 0)


async def test_a_change_costs_two_round_trips_and_a_digest_of_what_was_there(redis: RedisServer) -> None:
    store = RedisStore.open(redis.url, ttl_s=1000.0, timeout_s=5.0, counts=CacheCounts())
    keys = [f"key {number}".encode() for number in range(100)]
    values = dict.fromkeys(keys, bytes(500))
    assert await store.replace(dict.fromkeys(keys), values) == []

    async def traffic() -> tuple[int, int]:
        async with redis.client() as own:
            info = await own.info()
        return info["total_commands_processed"], info["total_net_input_bytes"]

    num_before, bytes_before = await traffic()
    before = dict(zip(keys, await store.read(keys), strict=True))
    assert await store.replace(before, values) == []
    num_after, bytes_after = await traffic()
    await store.close()
    # MGET, EVALSHA, and of the script 100 GETs and 100 SETs; to measure takes a connection's greeting and INFO.
    assert num_after - num_before <= 2 + 200 + 4
    assert bytes_after - bytes_before <= 100 * (500 + 40 + 100)


async def test_a_value_evicted_between_its_read_and_its_change_is_a_conflict_and_no_failure(
    redis: RedisServer,
) -> None:
    counts = CacheCounts()
    store = RedisStore.open(redis.url, ttl_s=1000.0, timeout_s=5.0, counts=counts)
    keys = [b"stays", b"vanishes"]
    async with redis.client() as own:
        for number in range(4):
            await own.mset(dict.fromkeys(keys, b"%d" % number))
            before = dict(zip(keys, await store.read(keys), strict=True))
            await own.delete(b"vanishes")
            assert await store.replace(before, dict.fromkeys(keys, b"more")) == [b"vanishes"]
            assert await store.read(keys) == [b"more", None]
            assert await store.replace({b"vanishes": None}, {b"vanishes": b"more"}) == []
    await store.close()
    assert (counts.errors, counts.skipped) == (0, 0)


async def test_more_calls_than_connections_are_not_made(redis: RedisServer) -> None:
    counts = CacheCounts()
    async with SlowProxy(redis.port, delay_s=0.05).running() as proxy:
        store = RedisStore.open(proxy.url, ttl_s=10.0, timeout_s=5.0, counts=counts)
        answers = await asyncio.gather(*[store.read([b"a"]) for _ in range(40)])
        await store.close()
    assert answers == [[None]] * 40
    assert counts.errors == 0
    assert counts.skipped == 24
    assert proxy.num_connections <= 16


async def test_a_redis_that_evicts_is_one_that_has_forgotten(redis: RedisServer) -> None:
    async with redis.client() as own, orchestrator(redis.url) as (client, cache):
        await answered(client, cache)
        await own.config_set("maxmemory-policy", "allkeys-random")
        for number in range(6):
            # Just above what it holds: something of ours goes with each write.
            used = (await own.info("memory"))["used_memory"]
            await own.config_set("maxmemory", str(used))
            await answered(client, cache, replace(OPTIONS, cache_salt=str(number)))
        assert (await own.info("stats"))["evicted_keys"] > 0
        assert cache.counts.invalid_values == 0
        await own.config_set("maxmemory", "0")


async def test_a_wrong_password_fails_no_request_and_is_said_once(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with redis.client() as own, orchestrator(with_password(redis, "outdated")) as (client, cache):
        await own.config_set("requirepass", "current")
        await many_answered(client, cache)
        assert 0 < cache.counts.errors < cache.counts.skipped
        assert await own.dbsize() == await num_reads(own) == 0
        # One of reads and one of writes, and neither has the password.
        assert_warned(caplog, ["AuthenticationError"] * 2)
        assert "outdated" not in caplog.text
        await own.config_set("requirepass", "outdated")
        await used_again(client, cache, own)
    assert_warned(caplog, ["AuthenticationError"] * 2)


async def test_a_password_that_changes_fails_no_request_and_is_said_once(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with redis.client() as own:
        await own.config_set("requirepass", "first")
        async with orchestrator(with_password(redis, "first")) as (client, cache):
            await answered(client, cache)
            size = await own.dbsize()
            assert size > 0
            await own.config_set("requirepass", "second")
            # A connection that has given a password keeps its rights: only new ones meet the other.
            await answered(client, cache, replace(OPTIONS, cache_salt="before"))
            assert cache.counts.errors == 0
            assert await own.dbsize() > size
            size = await own.dbsize()
            await own.client_kill_filter(_type="normal", skipme=True)
            await many_answered(client, cache)
            assert await own.dbsize() == size
            # Of connections that were closed, of the password, or both.
            assert_warned(caplog, ["Redis fails"] * 2)
            await own.config_set("requirepass", "first")
            await used_again(client, cache, own)
    assert_warned(caplog, ["Redis fails"] * 2)


async def test_a_replica_without_a_master_is_read_and_said_once(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with redis.client() as own:
        async with orchestrator(redis.url) as (client, cache):
            cold = await answered(client, cache)
        await own.replicaof("127.0.0.1", "1")
        async with orchestrator(redis.url) as (client, cache):
            warm = await answered(client, cache)
            assert cache.counts.hits > 0
            size = await own.dbsize()
            before = await num_reads(own)
            await many_answered(client, cache)
            assert await num_reads(own) > before
            assert await own.dbsize() == size
            assert_warned(caplog, ["read only replica"])
            await own.replicaof("NO", "ONE")
            await used_again(client, cache, own)
    assert_warned(caplog, ["read only replica"])
    assert warm.speculation.rounds < cold.speculation.rounds / 2


async def test_evicted_values_are_misses_and_said_nowhere(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async with redis.client() as own:
        await own.config_set("maxmemory-policy", "allkeys-lru")
        async with orchestrator(redis.url) as writer:
            await answered(*writer)
            async with orchestrator(redis.url) as (client, cache):
                await answered(client, cache)
                assert cache.counts.hits > 0
        keys = sorted(await own.keys("*"))
        await own.delete(*keys[::2])
        async with orchestrator(redis.url) as (client, cache):
            # Every other value is gone, and the rest goes while it runs, with what it has written itself. Above what
            # it holds there is room for buffers of connections, which cannot be evicted, and not for the tenants.
            await own.config_set("maxmemory", str((await own.info("memory"))["used_memory"] + (256 << 10)))
            await answered(client, cache)
            await many_answered(client, cache, 64)
            assert (await own.info("stats"))["evicted_keys"] > 100
            assert (await own.exists(*keys)) < len(keys)
            assert cache.counts.invalid_values == 0
            await own.config_set("maxmemory", "0")
            await used_again(client, cache, own)
    assert_warned(caplog, [])


def with_password(redis: RedisServer, password: str) -> str:
    """Where it is, for a client that gives this password."""
    return redis.url.replace("//", f"//:{password}@")


async def many_answered(client: Client, cache: PrefixCache, number: int = 24) -> None:
    """Requests of tenants of their own, more than a breaker has patience for, some at once."""
    for first in range(0, number, 4):
        tenants = [replace(OPTIONS, cache_salt=f"tenant {first + place}") for place in range(4)]
        await asyncio.gather(*[answered(client, cache, options) for options in tenants])


async def used_again(client: Client, cache: PrefixCache, own: Redis) -> None:
    """Go on until Redis is read and written again."""
    size, reads, salts = await own.dbsize(), await num_reads(own), itertools.count()

    async def is_used() -> bool:
        await answered(client, cache, replace(OPTIONS, cache_salt=f"again {next(salts)}"))
        return await own.dbsize() > size and await num_reads(own) > reads

    await until(is_used)


async def num_reads(own: Redis) -> int:
    """Reads that Redis has answered, without those that it refused."""
    calls: int = (await own.info("commandstats")).get("cmdstat_mget", {}).get("calls", 0)
    return calls


def assert_warned(caplog: pytest.LogCaptureFixture, told: list[str]) -> None:
    """Exactly so many lines at WARNING and above, each of which has its words."""
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == len(told), lines
    assert all(words in line for words, line in zip(told, lines, strict=True)), lines


async def test_a_node_of_a_cluster_that_sends_elsewhere_fails_no_request() -> None:
    """MOVED is an error of Redis like others: the one address of the settings is asked, and no other."""
    clustered = ("--cluster-enabled", "yes")
    async with redis_server(*clustered) as first, redis_server(*clustered) as second:
        async with first.client() as own, second.client() as other:
            await own.execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "8191")
            await other.execute_command("CLUSTER", "ADDSLOTSRANGE", "8192", "16383")
            await own.execute_command("CLUSTER", "MEET", "127.0.0.1", str(second.port))

            async def is_whole() -> bool:
                return b"cluster_state:ok" in await own.execute_command("CLUSTER", "INFO")

            await until(is_whole)
        async with orchestrator(first.url) as (client, cache):
            for number in range(8):
                await answered(client, cache, replace(OPTIONS, cache_salt=str(number)))
            assert cache.counts.errors > 0


async def test_a_replica_that_takes_over_is_used_with_what_it_has(redis: RedisServer) -> None:
    """The address leads to the replica once the master is gone, as that of a managed Redis does."""
    async with (
        redis_server("--replicaof", f"127.0.0.1 {redis.port}") as replica,
        replica.client() as own,
        SlowProxy(redis.port, delay_s=0.0).running() as proxy,
    ):
        async with orchestrator(proxy.url) as (client, cache):
            cold = await answered(client, cache)

            async def has_copied() -> bool:
                return await own.dbsize() > 0

            await until(has_copied)
            await redis.kill()
            # Before it is promoted it takes nothing.
            proxy.leads_to(replica.port)
            await answered(client, cache, replace(OPTIONS, cache_salt="in between"))
            await own.replicaof("NO", "ONE")
            before, salts = await own.dbsize(), itertools.count()

            async def takes() -> bool:
                await answered(client, cache, replace(OPTIONS, cache_salt=f"after {next(salts)}"))
                return await own.dbsize() > before

            await until(takes)
        # Another orchestrator is warm from what the master had been told.
        async with orchestrator(proxy.url) as (client, cache):
            warm = await answered(client, cache)
    assert warm.speculation.rounds < cold.speculation.rounds / 2


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Return as soon as something holds."""
    async with asyncio.timeout(30):
        while not await holds():  # noqa: ASYNC110 - Redis tells nobody
            await asyncio.sleep(0.05)
