"""Replicas of one drafter: each request has one of them, and another when it goes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest

from coppice.client import Client, Options
from coppice.v1 import sampling_pb2
from orchestrator.app import Orchestrator, running
from orchestrator.config import Config
from tests.conftest import StartFakes
from tests.fakes import FakeDrafter, FakeVerifier, eventually, perfect, serving, wrong
from tests.toy_target import babble, plain

PROMPT = [ord(character) for character in "def "]
COUNT = 200
RULES = (sampling_pb2.ACCEPTANCE_RULE_SAMPLE_AND_FOLLOW, sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL)


@dataclass
class Replicas:
    """Drafters that can be killed and started again one by one, and an orchestrator on them."""

    drafters: Sequence[FakeDrafter]
    verifier: FakeVerifier = field(default_factory=lambda: FakeVerifier(pass_s=0.004))
    addresses: list[str] = field(default_factory=list)
    servers: list[contextlib.AsyncExitStack] = field(default_factory=list)

    async def kill(self, index: int) -> None:
        await self.servers[index].aclose()

    async def revive(self, index: int) -> None:
        await self.servers[index].enter_async_context(serving(self.drafters[index], self.addresses[index]))


@contextlib.asynccontextmanager
async def replicas(*drafters: FakeDrafter) -> AsyncIterator[tuple[Replicas, Client, Orchestrator]]:
    made = Replicas(drafters)
    async with contextlib.AsyncExitStack() as stack:
        for drafter in drafters:
            server = await stack.enter_async_context(contextlib.AsyncExitStack())
            made.servers.append(server)
            made.addresses.append(await server.enter_async_context(serving(drafter)))
        address = await stack.enter_async_context(serving(made.verifier))
        config = Config(
            verifier_address=address,
            drafter_addresses=tuple(made.addresses),
            connect_timeout_s=10,
            grace_s=0,
            linger_ms=200,
            cache_drafter=False,
            planner="fixed",
        )
        orchestrator = await stack.enter_async_context(running(config))
        client = await stack.enter_async_context(Client(orchestrator.address))
        yield made, client, orchestrator


async def generate(client: Client, seed: int, speculation: str = "auto") -> list[int]:
    options = Options(max_tokens=COUNT, seed=seed, ignore_eos=True, speculation=speculation)
    return list((await client.generate(PROMPT, options)).token_ids)


async def test_each_request_has_one_replica_of_each_kind_and_the_least_busy(start_fakes: StartFakes) -> None:
    pair, other = [FakeDrafter(propose=wrong(after=1)) for _ in range(2)], FakeDrafter(kind="other")
    async with start_fakes(FakeVerifier(pass_s=0.004), *pair, other, linger_ms=200) as (client, _):
        assert list((await client.model_info()).sources) == ["other", "small-lm"]
        await asyncio.gather(*(generate(client, seed) for seed in range(6)))
        assert [len(drafter.opened) for drafter in (*pair, other)] == [3, 3, 6]
        await asyncio.gather(*(generate(client, seed, "small-lm") for seed in range(2)))
        assert [len(drafter.opened) for drafter in (*pair, other)] == [4, 4, 6]


async def test_of_equally_busy_replicas_the_one_that_has_read_the_beginning_is_asked(start_fakes: StartFakes) -> None:
    pair = [FakeDrafter(propose=perfect(depth=2), shared_block_tokens=4) for _ in range(2)]

    async def drafted_by(client: Client, prompt: list[int], salt: str) -> int:
        before = [len(drafter.opened) for drafter in pair]
        await client.generate(prompt, Options(max_tokens=3, ignore_eos=True, cache_salt=salt))
        [index] = [index for index, drafter in enumerate(pair) if len(drafter.opened) > before[index]]
        assert pair[index].opened[-1].cache_salt == salt
        return index

    async with start_fakes(FakeVerifier(pass_s=0.004), *pair) as (client, _):
        # Both at once, so that each replica gets one.
        await asyncio.gather(
            *(client.generate([token] * 9, Options(max_tokens=30, ignore_eos=True, cache_salt="a")) for token in (1, 2))
        )
        [first, second] = [drafter.opened[0].prompt_token_ids[0] for drafter in pair]
        assert {first, second} == {1, 2}
        assert await drafted_by(client, [second] * 6 + [3] * 9, "a") == 1
        assert await drafted_by(client, [first] * 6 + [3] * 9, "a") == 0
        assert await drafted_by(client, [second] * 6 + [3] * 9, "b") == 0


@pytest.mark.parametrize("killed", [0, 1])
async def test_a_killed_replicas_requests_are_drafted_by_another(killed: int) -> None:
    drafters = [FakeDrafter(propose=perfect(depth=2)) for _ in range(2)]
    async with replicas(*drafters) as (services, client, orchestrator):
        calls = [asyncio.create_task(generate(client, seed)) for seed in range(4)]
        await eventually(lambda: all(drafter.num_trees > 10 for drafter in drafters))
        before = len(drafters[1 - killed].opened)
        await services.kill(killed)
        await eventually(lambda: len(drafters[1 - killed].active) == 4)
        assert await asyncio.gather(*calls) == [plain(babble, PROMPT, COUNT, seed) for seed in range(4)]
        assert not any(one.num_sequences for one in orchestrator.drafters.clients)
    moved = drafters[1 - killed].opened[before:]
    assert len(moved) == 2
    # From where the outputs were then.
    assert all(len(opening.prompt_token_ids) > len(PROMPT) for opening in moved)
    assert not drafters[1 - killed].errors
    assert all(draft.linger_us for draft in services.verifier.drafts if draft.HasField("linger_us"))


async def test_counts_of_a_kind_are_those_of_all_its_replicas() -> None:
    drafters = [FakeDrafter(propose=perfect(depth=2)) for _ in range(2)]
    async with replicas(*drafters) as (services, client, _):
        call = asyncio.create_task(client.generate(PROMPT, Options(max_tokens=COUNT, seed=1, ignore_eos=True)))
        await eventually(lambda: drafters[0].num_trees > 10)
        await services.kill(0)
        stats = (await call).speculation
    assert drafters[1].num_trees > 10
    assert set(stats.sources) == {"small-lm"}
    assert stats.sources["small-lm"].proposed == stats.draft_tokens
    # Every proposal is right, whoever made it.
    assert stats.sources["small-lm"].accepted == stats.accepted_tokens == stats.draft_tokens > COUNT / 2


async def test_without_a_replica_left_requests_go_on_and_the_first_that_comes_takes_them_over() -> None:
    drafters = [FakeDrafter(propose=perfect(depth=1)) for _ in range(2)]
    async with replicas(*drafters) as (services, client, orchestrator):
        calls = [asyncio.create_task(generate(client, seed)) for seed in range(4)]
        await eventually(lambda: all(drafter.num_trees > 5 for drafter in drafters))
        await services.kill(0)
        await eventually(lambda: len(drafters[1].active) == 4)
        await services.kill(1)
        await eventually(lambda: orchestrator.drafters.connected_kinds() == ())
        assert all(not call.done() for call in calls)
        # The other than the one that had all of them.
        await services.revive(0)
        await eventually(lambda: len(drafters[0].active) == 4)
        assert await asyncio.gather(*calls) == [plain(babble, PROMPT, COUNT, seed) for seed in range(4)]


@pytest.mark.parametrize(
    "other", [FakeDrafter(kind="other"), FakeDrafter(acceptance_rules=RULES)], ids=["another kind", "other trees"]
)
async def test_a_drafter_that_is_no_replica_takes_nothing_over(other: FakeDrafter) -> None:
    lost = FakeDrafter(propose=wrong(after=1))
    async with replicas(lost, other) as (services, client, _):
        # Of two replicas that are not busy the first is chosen.
        call = asyncio.create_task(generate(client, 1, "small-lm"))
        await eventually(lambda: lost.num_trees > 5)
        await services.kill(0)
        assert await call == plain(babble, PROMPT, COUNT, 1)
    assert not other.opened
