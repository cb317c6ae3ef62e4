"""Several verifiers of one model: who gets what, and what is lost when one goes, which is nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice.client import Client, Options, RequestFailedError
from coppice.core.errors import UnavailableError
from coppice.v1 import sampling_pb2, verifier_pb2
from orchestrator.app import Orchestrator, running
from orchestrator.config import Config
from orchestrator.peers import verifier_pool
from tests.conftest import StartFakes
from tests.fakes import FakeDrafter, FakeVerifier, eventually, serving, wrong
from tests.toy_target import CONTEXT, babble, plain

PROMPT = [ord(character) for character in "def "]
COUNT = 60
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Fleet:
    """Verifiers that can be killed and started again one by one, and an orchestrator on them."""

    verifiers: Sequence[FakeVerifier]
    addresses: list[str] = field(default_factory=list)
    servers: list[contextlib.AsyncExitStack] = field(default_factory=list)

    async def kill(self, index: int) -> None:
        await self.servers[index].aclose()

    async def revive(self, index: int) -> None:
        await self.servers[index].enter_async_context(serving(self.verifiers[index], self.addresses[index]))


@contextlib.asynccontextmanager
async def fleet(
    *verifiers: FakeVerifier, drafters: Sequence[str] = (), resume_s: float = 5.0
) -> AsyncIterator[tuple[Fleet, Client, Orchestrator]]:
    made = Fleet(verifiers)
    async with contextlib.AsyncExitStack() as stack:
        for verifier in verifiers:
            server = await stack.enter_async_context(contextlib.AsyncExitStack())
            made.servers.append(server)
            made.addresses.append(await server.enter_async_context(serving(verifier)))
        address = ",".join(made.addresses)
        config = Config(
            verifier_address=address,
            drafter_addresses=tuple(drafters),
            connect_timeout_s=10,
            grace_s=0,
            resume_s=resume_s,
            linger_ms=20,
        )
        orchestrator = await stack.enter_async_context(running(config))
        client = await stack.enter_async_context(Client(orchestrator.address))
        # A call that its server has not begun yet is sent to the next server unseen.
        await eventually(lambda: all(verifier.streams for verifier in verifiers))
        yield made, client, orchestrator


async def health(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    status: int = response.status
    return status


def load(**values: int) -> verifier_pb2.VerifyResponse:
    return verifier_pb2.VerifyResponse(load=verifier_pb2.Load(**values))


async def test_sequences_are_shared_out_evenly(start_fakes: StartFakes) -> None:
    verifiers = [FakeVerifier(pass_s=0.01) for _ in range(3)]
    async with start_fakes(verifiers) as (client, orchestrator):
        calls = [client.generate(PROMPT, Options(max_tokens=COUNT, seed=seed)) for seed in range(12)]
        completions = await asyncio.gather(*calls)
        assert orchestrator.verifiers.num_sequences == 0
        assert (await client.model_info()).num_verifiers == 3
    assert [len(verifier.opened) for verifier in verifiers] == [4, 4, 4]
    for seed, completion in enumerate(completions):
        assert list(completion.token_ids) == plain(babble, PROMPT, COUNT, seed)


async def test_prompts_that_begin_alike_go_where_their_beginning_was_computed(start_fakes: StartFakes) -> None:
    verifiers = [FakeVerifier(shared_block_tokens=8) for _ in range(2)]
    families = [[family] * 80 for family in b"abcd"]
    chooser = random.Random(1)
    async with start_fakes(verifiers) as (client, _):
        for turn in range(5):
            for family in families if turn == 0 else chooser.sample(families, len(families)):
                await client.generate([*family, *b"turn", turn], Options(max_tokens=2))
        homes = [{opening.prompt_token_ids[0] for opening in verifier.opened} for verifier in verifiers]
        assert not homes[0] & homes[1]
        assert len(homes[0]) == len(homes[1]) == 2
        # Under another salt nothing of it is there, so that turns are taken.
        before = [len(verifier.opened) for verifier in verifiers]
        for number in range(4):
            await client.generate(families[0], Options(max_tokens=2, cache_salt=str(number)))
        assert [len(verifier.opened) - one for verifier, one in zip(verifiers, before, strict=True)] == [2, 2]


async def test_what_others_do_to_a_verifier_counts_while_it_is_news(
    start_fakes: StartFakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifiers = [FakeVerifier(), FakeVerifier()]
    async with start_fakes(verifiers) as (client, orchestrator):

        async def taken(busy: verifier_pb2.VerifyResponse) -> list[int]:
            before = [len(verifier.opened) for verifier in verifiers]
            await eventually(lambda: bool(verifiers[0].streams))
            verifiers[0].tell(busy)
            await eventually(lambda: orchestrator.verifiers.clients[0].load.pass_us == busy.load.pass_us)
            for seed in range(4):
                await client.generate(PROMPT, Options(max_tokens=2, seed=seed))
            return [len(verifier.opened) - one for verifier, one in zip(verifiers, before, strict=True)]

        assert await taken(load(running_sequences=3, queued_sequences=1, free_kv_blocks=99, pass_us=1)) == [0, 4]
        assert await taken(load(free_kv_blocks=0, pass_us=2)) == [0, 4]
        # Those that ended with the pass keep nobody busy.
        assert await taken(load(batch_size=3, free_kv_blocks=99, pass_us=4)) == [2, 2]
        monkeypatch.setattr("orchestrator.peers.verifier_client.LOAD_IS_NEWS_S", 0.0)
        assert await taken(load(running_sequences=3, pass_us=3)) == [2, 2]


@pytest.mark.parametrize("has_drafter", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize("killed", [0, 1])
async def test_a_killed_verifiers_sequences_go_on_elsewhere_without_a_lost_or_repeated_token(
    killed: int, has_drafter: bool
) -> None:
    verifiers = [FakeVerifier(pass_s=0.005), FakeVerifier(pass_s=0.005)]
    drafter = FakeDrafter(propose=wrong(after=1))
    async with contextlib.AsyncExitStack() as stack:
        drafters = [await stack.enter_async_context(serving(drafter))] if has_drafter else []
        services, client, orchestrator = await stack.enter_async_context(fleet(*verifiers, drafters=drafters))
        calls = [
            asyncio.create_task(client.generate(PROMPT, Options(max_tokens=120, seed=seed, ignore_eos=True)))
            for seed in range(8)
        ]
        await eventually(lambda: all(verifier.num_outcomes > 20 for verifier in verifiers))
        moved = len(verifiers[killed].active)
        await services.kill(killed)
        completions = await asyncio.gather(*calls)
        assert orchestrator.verifiers.num_sequences == 0
        assert await health(orchestrator.address) == SERVING
        assert (await client.model_info()).num_verifiers == 1
    for seed, completion in enumerate(completions):
        assert list(completion.token_ids) == plain(babble, PROMPT, 120, seed)
        assert completion.text == bytes(plain(babble, PROMPT, 120, seed)).decode()
    assert moved == 4
    reopened = [opening for opening in verifiers[1 - killed].opened if opening.resumed_tokens]
    assert len(reopened) == moved
    assert not drafter.errors


async def test_a_verifier_without_room_is_passed_over(start_fakes: StartFakes) -> None:
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
    verifiers = [FakeVerifier(fails_with=exhausted.value[0]), FakeVerifier()]
    async with start_fakes(verifiers) as (client, orchestrator):
        for seed in range(4):
            completion = await client.generate(PROMPT, Options(max_tokens=9, seed=seed))
            assert list(completion.token_ids) == plain(babble, PROMPT, 9, seed)
        assert [len(verifier.opened) for verifier in verifiers] == [1, 4]
        verifiers[1].fails_with = exhausted.value[0]
        with pytest.raises(RequestFailedError) as caught:
            await client.generate(PROMPT, Options(max_tokens=9))
        assert caught.value.code == exhausted
        assert caught.value.retry_after_s is not None
        assert orchestrator.verifiers.num_sequences == 0


async def test_a_request_finds_the_one_verifier_that_has_room(start_fakes: StartFakes) -> None:
    """However many have none: that is no loss of a verifier, of which few are borne."""
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    verifiers = [*(FakeVerifier(fails_with=exhausted) for _ in range(6)), FakeVerifier()]
    async with start_fakes(verifiers) as (client, _):
        completion = await client.generate(PROMPT, Options(max_tokens=9, seed=3))
        assert list(completion.token_ids) == plain(babble, PROMPT, 9, 3)
        verifiers[-1].fails_with = exhausted
        with pytest.raises(RequestFailedError) as caught:
            await client.generate(PROMPT, Options(max_tokens=9))
        assert caught.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.retry_after_s is not None


async def test_the_policy_of_a_request_holds_wherever_it_runs(start_fakes: StartFakes) -> None:
    verifiers = [FakeVerifier(pass_s=0.01) for _ in range(2)]
    drafters = [FakeDrafter(kind=kind, propose=wrong(after=2, depth=6)) for kind in ("a", "a", "b")]
    policies = {
        "auto": Options(max_tokens=20, seed=1),
        "off": Options(max_tokens=20, seed=2, speculation="off"),
        "forced": Options(max_tokens=20, seed=3, speculation="a,b"),
        "only b": Options(max_tokens=20, seed=4, speculation="b"),
        "capped": Options(max_tokens=20, seed=5, max_nodes=2),
        "none": Options(max_tokens=20, seed=6, max_nodes=0),
    }
    async with start_fakes(verifiers, *drafters, linger_ms=500) as (client, _):
        for options in policies.values():
            # On both verifiers, since turns are taken.
            both = [await client.generate(PROMPT, options) for _ in range(2)]
            assert [list(one.token_ids) for one in both] == [plain(babble, PROMPT, 20, options.seed or 0)] * 2
            for one in both:
                expected = {"off": set(), "none": set(), "only b": {"b"}}
                [name] = [name for name, other in policies.items() if other is options]
                assert set(one.speculation.sources) <= expected.get(name, {"a", "b"})
                assert bool(one.speculation.draft_tokens) == (name not in ("off", "none"))
    for verifier in verifiers:
        assert sorted(opening.sampling.seed for opening in verifier.opened) == [1, 2, 3, 4, 5, 6]
        budgets = {draft.budget for draft in verifier.drafts}
        assert budgets == {2, 15}
    assert sorted({opening.sampling.seed for opening in drafters[2].opened}) == [1, 3, 4, 5]
    seeds = [opening.sampling.seed for drafter in drafters[:2] for opening in drafter.opened]
    # Each request has one of the two.
    assert sorted(seeds) == [1, 1, 3, 3, 5, 5]


async def test_verifiers_that_go_one_after_another_lose_nothing() -> None:
    verifiers = [FakeVerifier(pass_s=0.003, drops=2, drop_after=30 + 11 * index) for index in range(3)]
    async with fleet(*verifiers) as (_, client, orchestrator):
        calls = [client.generate(PROMPT, Options(max_tokens=COUNT, seed=seed)) for seed in range(9)]
        completions = await asyncio.gather(*calls)
        assert orchestrator.verifiers.num_sequences == 0
    assert [verifier.drops for verifier in verifiers] == [0, 0, 0]
    for seed, completion in enumerate(completions):
        assert list(completion.token_ids) == plain(babble, PROMPT, COUNT, seed)


async def test_when_all_have_gone_the_first_that_comes_back_takes_over() -> None:
    verifiers = [FakeVerifier(pass_s=0.005), FakeVerifier(pass_s=0.005)]
    async with fleet(*verifiers) as (services, client, orchestrator):
        call = asyncio.create_task(client.generate(PROMPT, Options(max_tokens=COUNT, seed=7)))
        await eventually(lambda: sum(verifier.num_outcomes for verifier in verifiers) > 5)
        [first] = [index for index, verifier in enumerate(verifiers) if verifier.active]
        for index in (0, 1):
            await services.kill(index)
        await eventually(lambda: orchestrator.verifiers.num_usable == 0)
        later = asyncio.create_task(client.generate(PROMPT, Options(max_tokens=COUNT, seed=8)))
        await services.revive(1 - first)
        assert list((await call).token_ids) == plain(babble, PROMPT, COUNT, 7)
        assert list((await later).token_ids) == plain(babble, PROMPT, COUNT, 8)


async def test_health_follows_whether_any_verifier_is_there() -> None:
    async with fleet(FakeVerifier(), FakeVerifier(), resume_s=0.2) as (services, client, orchestrator):
        await services.kill(0)
        await eventually(lambda: orchestrator.verifiers.num_usable == 1)
        assert await health(orchestrator.address) == SERVING
        await services.kill(1)
        await eventually(lambda: orchestrator.verifiers.num_usable == 0)
        assert await health(orchestrator.address) == NOT_SERVING
        await asyncio.sleep(0.3)
        with pytest.raises(RequestFailedError) as caught:
            await client.generate(PROMPT, Options(max_tokens=2))
        assert caught.value.code == grpc.StatusCode.UNAVAILABLE
        await services.revive(1)
        await eventually(lambda: orchestrator.verifiers.num_usable == 1)
        assert await health(orchestrator.address) == SERVING
        assert len((await client.generate(PROMPT, Options(max_tokens=2))).token_ids) == 2


async def test_a_verifier_that_drains_keeps_what_it_has_and_is_let_go() -> None:
    verifiers = [FakeVerifier(pass_s=0.005), FakeVerifier(pass_s=0.005)]
    async with fleet(*verifiers) as (_, client, orchestrator):
        running_ones = [
            asyncio.create_task(client.generate(PROMPT, Options(max_tokens=COUNT, seed=seed))) for seed in range(4)
        ]
        await eventually(lambda: all(len(verifier.active) == 2 for verifier in verifiers))
        verifiers[0].drain()
        await eventually(lambda: orchestrator.verifiers.clients[0].is_draining)
        later = [client.generate(PROMPT, Options(max_tokens=2, seed=seed)) for seed in range(4)]
        await asyncio.gather(*later)
        assert [len(verifier.opened) for verifier in verifiers] == [2, 6]
        [stream] = verifiers[0].streams
        for seed, completion in enumerate(await asyncio.gather(*running_ones)):
            assert list(completion.token_ids) == plain(babble, PROMPT, COUNT, seed)
        # Nothing holds it any more: a process would end here, and not wait for its grace.
        await eventually(lambda: stream not in verifiers[0].streams)
        assert [len(verifier.opened) for verifier in verifiers] == [2, 6]


async def test_a_draining_verifier_is_used_while_there_is_no_other() -> None:
    verifiers = [FakeVerifier(), FakeVerifier()]
    async with fleet(*verifiers) as (services, client, orchestrator):
        await services.kill(1)
        await eventually(lambda: orchestrator.verifiers.num_usable == 1)
        verifiers[0].drain()
        await eventually(lambda: orchestrator.verifiers.clients[0].is_draining)
        assert list((await client.generate(PROMPT, Options(max_tokens=9, seed=1))).token_ids) == plain(
            babble, PROMPT, 9, 1
        )
        await services.revive(1)
        await eventually(lambda: orchestrator.verifiers.num_usable == 2)
        await client.generate(PROMPT, Options(max_tokens=9, seed=1))
    assert [len(verifier.opened) for verifier in verifiers] == [1, 1]


ODD = {
    "model": FakeVerifier(model="another"),
    "tokenizer_fingerprint": FakeVerifier(tokenizer_fingerprint="f" * 64),
    "dtype": FakeVerifier(dtype="bfloat16"),
    "serving_fingerprint": FakeVerifier(serving_fingerprint="other weights"),
    "max_context_tokens": FakeVerifier(max_context_tokens=99),
    "exactness": FakeVerifier(exactness=sampling_pb2.EXACTNESS_FAST),
}


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("place", [0, 2])
async def test_the_odd_one_out_is_refused_and_the_others_serve(
    what: str, place: int, start_fakes: StartFakes, caplog: pytest.LogCaptureFixture
) -> None:
    odd, others = ODD[what], [FakeVerifier(), FakeVerifier()]
    odd.opened.clear()
    verifiers = [*others[:place], odd, *others[place:]]
    with caplog.at_level(logging.ERROR, "orchestrator"):
        async with start_fakes(verifiers) as (client, orchestrator):
            await eventually(lambda: len(orchestrator.verifiers.refusals()) == 1)
            for seed in range(4):
                completion = await client.generate(PROMPT, Options(max_tokens=9, seed=seed))
                assert list(completion.token_ids) == plain(babble, PROMPT, 9, seed)
            info = await client.model_info()
            assert info.num_verifiers == 2
            assert info.model == "toy"
            address = orchestrator.verifiers.clients[place].address
            assert await health(orchestrator.address) == SERVING
            await asyncio.sleep(0.3)
    assert not odd.opened
    [refusal] = info.refusals
    # Where it is and what it serves is for the log, once, however often it is tried again.
    assert refusal == "a verifier: serves something else than the others"
    [record] = caplog.records
    assert f"the verifier {address} does not serve what is served here: {what}" in record.getMessage()


async def test_a_verifier_that_comes_back_with_another_model_is_refused_and_with_its_own_taken() -> None:
    verifiers = [FakeVerifier(), FakeVerifier()]
    async with fleet(*verifiers) as (services, client, orchestrator):
        await services.kill(0)
        verifiers[0].model = "another"
        await services.revive(0)
        await eventually(lambda: bool(orchestrator.verifiers.refusals()))
        assert orchestrator.verifiers.num_usable == 1
        await services.kill(0)
        verifiers[0].model = "toy"
        await services.revive(0)
        await eventually(lambda: orchestrator.verifiers.num_usable == 2)
        assert not (await client.model_info()).refusals


async def test_the_target_is_that_of_the_wanted_revision_whatever_most_serve() -> None:
    old = [FakeVerifier(model="old", target_revision="1"), FakeVerifier(model="old", target_revision="1")]
    new = FakeVerifier(model="new", target_revision="2")
    async with contextlib.AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving(one)) for one in (*old, new)]
        config = Config(verifier_address=",".join(addresses), target_revision="2", connect_timeout_s=10, grace_s=0)
        orchestrator = await stack.enter_async_context(running(config))
        client = await stack.enter_async_context(Client(orchestrator.address))
        assert (await client.model_info()).model == "new"
        assert len((await client.generate(PROMPT, Options(max_tokens=3))).token_ids) == 3
        assert not any(one.opened for one in old)
        # From here on what they serve counts, and not what it is called.
        old[0].model = "new"
        await eventually(lambda: orchestrator.verifiers.num_usable == 2)


async def test_a_verifier_with_a_longer_context_is_taken() -> None:
    verifiers = [FakeVerifier(), FakeVerifier()]
    async with fleet(*verifiers) as (services, _, orchestrator):
        for verifier, context in zip(verifiers, (2 * CONTEXT, CONTEXT // 2), strict=True):
            index = verifiers.index(verifier)
            await services.kill(index)
            verifier.max_context_tokens = context
            await services.revive(index)
        await eventually(lambda: bool(orchestrator.verifiers.refusals()))
        assert [client.address for client in orchestrator.verifiers.clients if client.stream.refusal] == [
            services.addresses[1]
        ]
        await eventually(lambda: orchestrator.verifiers.num_usable == 1)


async def test_it_ends_where_the_target_has_been_replaced_and_not_where_verifiers_are_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verifier_pool, "REPLACED_S", 0.5)
    monkeypatch.setattr(verifier_pool, "LOOK_S", 0.05)
    verifiers = [FakeVerifier(), FakeVerifier()]
    async with fleet(*verifiers, resume_s=0.2) as (services, _, orchestrator):
        replaced = asyncio.create_task(orchestrator.verifiers.replaced())
        verifiers[0].model = "another"
        await services.kill(0)
        await services.revive(0)
        # One still serves what is served here.
        await eventually(lambda: bool(orchestrator.verifiers.refusals()))
        await asyncio.sleep(1.0)
        assert not replaced.done()
        # None does, but none says that it serves another target.
        await services.kill(0)
        await eventually(lambda: not orchestrator.verifiers.refusals())
        await services.kill(1)
        await asyncio.sleep(1.0)
        assert not replaced.done()
        # One of two serves another target, and the other may come back.
        await services.revive(0)
        await eventually(lambda: bool(orchestrator.verifiers.refusals()))
        await asyncio.sleep(1.5)
        assert not replaced.done()
        verifiers[1].model = "another"
        await services.revive(1)
        await asyncio.wait_for(replaced, 20.0)
        assert orchestrator.verifiers.is_replaced


async def test_without_a_verifier_of_the_revision_nothing_is_served() -> None:
    async with serving(FakeVerifier(target_revision="1")) as address:
        config = Config(verifier_address=address, target_revision="2", connect_timeout_s=0.5, grace_s=0)
        with pytest.raises(UnavailableError, match="has the target revision '1', and '2' is wanted"):
            await running(config).__aenter__()


async def test_one_that_is_not_there_does_not_keep_the_others_from_serving() -> None:
    async with serving(FakeVerifier()) as address:
        config = Config(verifier_address=f"127.0.0.1:1, {address}", connect_timeout_s=10, grace_s=0)
        async with running(config) as orchestrator, Client(orchestrator.address) as client:
            assert len((await client.generate(PROMPT, Options(max_tokens=3))).token_ids) == 3
            assert (await client.model_info()).num_verifiers == 1
