"""Several orchestrators of the same verifiers: a prompt goes where another one sent its beginning."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from coppice.client import Client, Options
from coppice.v1 import verifier_pb2
from orchestrator.app import Orchestrator, running
from orchestrator.config import Config
from tests.conftest import orchestrator_on_fakes
from tests.fakes import FakeVerifier, eventually, serving
from tests.redis_server import RedisServer, SlowProxy, needs_redis, redis_server
from tests.toy_target import babble, plain

pytestmark = needs_redis

FAMILIES = [[family] * 80 for family in b"abcdefgh"]


@pytest.fixture
async def redis() -> AsyncIterator[RedisServer]:
    async with redis_server() as server:
        yield server


@contextlib.asynccontextmanager
async def orchestrators(
    verifiers: Sequence[FakeVerifier], *urls: str, **settings: Any
) -> AsyncIterator[list[tuple[Client, Orchestrator]]]:
    """One on each of these Redis, in front of the same verifiers."""
    async with contextlib.AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving(one)) for one in verifiers]
        made = []
        for url in urls:
            chosen = {"redis_timeout_ms": 5000.0, "cache_secret": "of all", "planner": "fixed", **settings}
            config = Config(
                verifier_address=",".join(addresses), connect_timeout_s=10.0, grace_s=0.0, redis_url=url, **chosen
            )
            orchestrator = await stack.enter_async_context(running(config))
            made.append((await stack.enter_async_context(Client(orchestrator.address)), orchestrator))
        await eventually(lambda: all(len(one.streams) == len(urls) for one in verifiers))
        yield made


def replicas() -> list[FakeVerifier]:
    return [FakeVerifier(shared_block_tokens=8, instance_id=name) for name in ("one", "two")]


def homes(openings: Sequence[Sequence[verifier_pb2.OpenSequence]]) -> dict[int, set[int]]:
    """By family, the verifiers that it went to."""
    found: dict[int, set[int]] = {}
    for number, opened in enumerate(openings):
        for opening in opened:
            found.setdefault(opening.prompt_token_ids[0], set()).add(number)
    return found


async def say(client: Client, prompt: list[int], seed: int = 0) -> None:
    completion = await client.generate(prompt, Options(max_tokens=2, seed=seed, ignore_eos=True))
    assert list(completion.token_ids) == plain(babble, prompt, 2, seed)


async def notes_written(redis: RedisServer, before: int) -> None:
    """Return when a further orchestrator's notes are in Redis."""
    async with redis.client() as own, asyncio.timeout(10):
        while await own.dbsize() < before:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)


async def test_a_second_orchestrator_sends_prompts_where_the_first_has_sent_their_beginnings(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Room for a machine that is busy with other things.
    monkeypatch.setattr("orchestrator.peers.shared_affinity.WAIT_S", 5.0)
    verifiers = replicas()
    async with orchestrators(verifiers, redis.url, redis.url) as [(first, _), (second, running)]:
        for family in FAMILIES:
            await say(first, [*family, 1])
        of_first = homes([one.opened for one in verifiers])
        assert sorted(len(one.opened) for one in verifiers) == [4, 4]
        await notes_written(redis, len(FAMILIES))
        before = [len(one.opened) for one in verifiers]
        for family in random.Random(1).sample(FAMILIES, len(FAMILIES)):
            await say(second, [*family, 2, 3])
        of_second = homes([one.opened[count:] for one, count in zip(verifiers, before, strict=True)])
        assert of_second == of_first
        assert running.verifiers.affinity is not None
        counts = running.verifiers.affinity.counts
        # One read for each family, of at most eight keys.
        assert counts.reads == len(FAMILIES)
        assert counts.hits >= len(FAMILIES)
        assert (counts.errors, counts.invalid_values) == (0, 0)
        for family in FAMILIES:
            await say(second, [*family, 4])
        assert counts.reads == len(FAMILIES)


async def test_a_redis_that_is_killed_slow_or_absent_fails_no_request(redis: RedisServer) -> None:
    async with SlowProxy(redis.port, delay_s=3.0).running() as proxy:
        for url in (redis.url, proxy.url, "redis://127.0.0.1:1/0"):
            verifiers = replicas()
            async with orchestrators(verifiers, url, redis_timeout_ms=30.0) as [(client, running)]:
                async with asyncio.timeout(10):
                    for number, family in enumerate(FAMILIES):
                        if url == redis.url and number == 4:
                            await redis.kill()
                        await say(client, [*family, 1])
                assert sum(len(one.opened) for one in verifiers) == len(FAMILIES)
                assert running.verifiers.affinity is not None
                counts = running.verifiers.affinity.counts
                assert counts.errors >= 3
                if url != redis.url:
                    # Whom nobody answers nobody asks.
                    assert counts.skipped > 0
                    assert counts.hits == 0
            await redis.kill()
            await redis.start()


async def test_with_one_verifier_or_no_redis_nothing_is_shared(redis: RedisServer) -> None:
    for verifiers, url in ((replicas()[:1], redis.url), (replicas(), "")):
        async with orchestrator_on_fakes(verifiers, cache_drafter=True, redis_url=url) as (_, running):
            assert running.verifiers.affinity is None
