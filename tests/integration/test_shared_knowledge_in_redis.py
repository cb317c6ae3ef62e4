"""What a planner learns, in a real Redis: the next orchestrator begins with it, and without Redis with nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from coppice.client import Client, Options
from orchestrator.planner.adaptive import AdaptivePlanner
from orchestrator.planner.shared_knowledge import SharedKnowledge
from orchestrator.prefix_cache.keys import PREFIX, CacheNamespace, knowledge_key
from tests.conftest import orchestrator_on_fakes
from tests.fakes import FakeDrafter, FakeVerifier, perfect
from tests.redis_server import RedisServer, SlowProxy, needs_redis, redis_server
from tests.toy_target import MODEL, babble, plain

pytestmark = needs_redis

PROMPT = [ord(character) for character in "def "]
OPTIONS = Options(max_tokens=300, seed=5, ignore_eos=True)
EXPECTED = tuple(plain(babble, PROMPT, 300, 5))
HARDWARE = "a machine"


@pytest.fixture
async def redis() -> AsyncIterator[RedisServer]:
    async with redis_server() as server:
        yield server


@contextlib.asynccontextmanager
async def orchestrator(
    url: str, hardware: str = HARDWARE, kind: str = "small-lm", **settings: Any
) -> AsyncIterator[tuple[Client, AdaptivePlanner, SharedKnowledge]]:
    verifier = FakeVerifier(pass_s=0.001, hardware=hardware)
    drafter = FakeDrafter(propose=perfect(depth=1), kind=kind)
    # Room for a machine that is busy with other things.
    patience = {"redis_timeout_ms": 5000.0}
    chosen = {"cache_secret": "of all", "planner": "adaptive", "cache_drafter": True, **patience, **settings}
    async with orchestrator_on_fakes(verifier, drafter, redis_url=url, **chosen) as (client, running):
        planner = running.service._planner
        assert isinstance(planner, AdaptivePlanner)
        assert running.knowledge is not None
        yield client, planner, running.knowledge


async def teach(url: str) -> None:
    """Leave the knowledge of one request."""
    async with orchestrator(url) as (client, planner, _):
        completion = await client.generate(PROMPT, OPTIONS)
        assert completion.token_ids == EXPECTED
        assert planner.pass_number >= 100


async def test_a_second_orchestrator_begins_with_what_the_first_has_learned(redis: RedisServer) -> None:
    async with orchestrator(redis.url) as (client, planner, knowledge):
        assert planner.knowledge() is None
        assert (knowledge.counts.hits, knowledge.counts.misses) == (0, 1)
        await client.generate(PROMPT, OPTIONS)
    async with orchestrator(redis.url) as (client, planner, knowledge):
        assert planner.knowledge() is not None
        assert planner.pass_number == 0
        assert (knowledge.counts.hits, knowledge.counts.misses) == (1, 0)
        completion = await client.generate(PROMPT, OPTIONS)
        assert completion.token_ids == EXPECTED


@pytest.mark.parametrize("other", [{"hardware": "another"}, {"kind": "semi-ar"}, {"cache_secret": "of another"}])
async def test_other_hardware_other_drafters_and_other_secrets_find_nothing(
    redis: RedisServer, other: dict[str, Any]
) -> None:
    await teach(redis.url)
    async with orchestrator(redis.url, **other) as (_, planner, knowledge):
        assert planner.knowledge() is None
        assert (knowledge.counts.hits, knowledge.counts.misses) == (0, 1)


async def test_it_dies_with_its_time_and_garbage_is_counted_and_replaced(redis: RedisServer) -> None:
    await teach(redis.url)
    namespace = CacheNamespace(b"of all", MODEL, FakeVerifier().serving_fingerprint)
    key = knowledge_key(namespace, HARDWARE, 1, ["cache", "small-lm"])
    async with redis.client() as own:
        assert key.startswith(PREFIX)
        assert 0 < await own.pttl(key) <= 86_400_000
        assert len(await own.get(key)) < 1000
        await own.set(key, b"\x01\x10garbage")
        async with orchestrator(redis.url) as (client, planner, knowledge):
            assert planner.knowledge() is None
            assert knowledge.counts.invalid_values == 1
            await client.generate(PROMPT, OPTIONS)
        await own.delete(key)
        await own.lpush(key, "not a string")
        async with orchestrator(redis.url) as (client, planner, knowledge):
            assert planner.knowledge() is None
            # For another tenant, who is told nothing of the output and needs as many rounds as the first.
            await client.generate(PROMPT, replace(OPTIONS, cache_salt="another"))
    async with orchestrator(redis.url) as (_, planner, knowledge):
        assert planner.knowledge() is not None


@pytest.mark.parametrize("is_there", [True, False], ids=["slow", "absent"])
async def test_a_redis_that_does_not_answer_holds_up_the_start_only_shortly(redis: RedisServer, is_there: bool) -> None:
    await teach(redis.url)
    async with SlowProxy(redis.port, delay_s=3.0).running() as proxy:
        began_s = time.monotonic()
        url = proxy.url if is_there else "redis://127.0.0.1:1/0"
        async with orchestrator(url, redis_timeout_ms=30.0) as (client, planner, knowledge):
            assert time.monotonic() - began_s < 2.5
            assert planner.knowledge() is None
            assert knowledge.counts.errors == 1
            completion = await client.generate(PROMPT, OPTIONS)
            assert completion.token_ids == EXPECTED


async def test_a_redis_that_is_killed_or_full_costs_the_knowledge_and_nothing_else(redis: RedisServer) -> None:
    async with orchestrator(redis.url) as (client, _, knowledge):
        async with redis.client() as own:
            await own.config_set("maxmemory-policy", "noeviction")
            await own.config_set("maxmemory", "1")
        completion = await client.generate(PROMPT, OPTIONS)
        assert completion.token_ids == EXPECTED
        await knowledge._write()
        assert knowledge.counts.errors == 1
        await redis.kill()
        completion = await client.generate(PROMPT, OPTIONS)
        assert completion.token_ids == EXPECTED
    await redis.start()
    async with orchestrator(redis.url) as (_, planner, _):
        assert planner.knowledge() is None


async def test_without_a_redis_and_with_the_fixed_plan_nothing_is_shared(redis: RedisServer) -> None:
    for settings in ({"redis_url": ""}, {"redis_url": redis.url, "planner": "fixed"}):
        chosen = {"planner": "adaptive", "cache_drafter": True, **settings}
        async with orchestrator_on_fakes(FakeVerifier(), **chosen) as (_, running):
            assert running.knowledge is None
