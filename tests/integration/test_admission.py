"""Requests that have to wait, at a real orchestrator: bounds, order, shares, deadlines and cancelled calls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator

import grpc
import pytest

from coppice.client import Client, Options, RequestFailedError
from coppice.completion import Completion
from coppice.v1 import inference_pb2
from orchestrator.admission.admission import Ticket
from orchestrator.admission.fair_queue import AdmissionRequest
from orchestrator.app import Orchestrator
from tests.conftest import StartFakes
from tests.fakes import FakeDrafter, FakeVerifier, eventually
from tests.toy_target import babble, plain

PROMPT = [ord(character) for character in "def "]
ENDLESS = Options(max_tokens=300, seed=1, ignore_eos=True)
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


async def begin(client: Client, options: Options = ENDLESS) -> AsyncIterator[object]:
    """The chunks of a request that has its place."""
    chunks = aiter(client.stream(PROMPT, options))
    await anext(chunks)
    return chunks


def waits(orchestrator: Orchestrator, num_running: int, num_waiting: int) -> bool:
    admission = orchestrator.service.admission
    return (admission.num_running, admission.num_waiting) == (num_running, num_waiting)


async def test_requests_that_wait_are_served_in_turn_with_the_same_tokens(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier()
    async with start_fakes(verifier, FakeDrafter(), max_requests=2) as (client, orchestrator):
        calls = [client.generate(PROMPT, Options(max_tokens=40, seed=seed)) for seed in range(10)]
        completions = await asyncio.gather(*calls)
        assert orchestrator.service.num_requests == 0
    for seed, completion in enumerate(completions):
        assert list(completion.token_ids) == plain(babble, PROMPT, 40, seed)
    # What they waited for is in their times.
    waited_ms = [completion.timing.queue_ms for completion in completions]
    assert max(waited_ms) > 10 > min(waited_ms)
    for times in (one.timing for one in completions):
        assert times.queue_ms < times.ttft_ms < times.total_ms
        # These verifiers have room at once.
        assert times.door_ms == pytest.approx(times.queue_ms, abs=1)
        assert 0 < times.prompt_ms <= times.ttft_ms - times.queue_ms
        assert times.first_pass_ms >= 0


async def test_a_full_queue_turns_requests_away_with_the_time_of_a_place(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(pass_s=0.002), max_requests=1, max_queued=2) as (client, orchestrator):
        # A hundred rounds of two milliseconds and more.
        done = await client.generate(PROMPT, Options(max_tokens=100, seed=1, ignore_eos=True))
        running = await begin(client)
        waiting = [asyncio.create_task(client.generate(PROMPT, ENDLESS)) for _ in range(2)]
        await eventually(lambda: waits(orchestrator, 1, 2))
        with pytest.raises(RequestFailedError, match="1 running, 2 waiting") as caught:
            await client.generate(PROMPT, ENDLESS)
        assert caught.value.code == EXHAUSTED
        # Three have to go before it, each of which takes as long as the one before did.
        assert caught.value.retry_after_s == pytest.approx(3 * done.timing.total_ms / 1000, rel=0.3)
        for call in waiting:
            call.cancel()
        await eventually(lambda: waits(orchestrator, 1, 0))
        await running.aclose()  # type: ignore[attr-defined]
        await eventually(lambda: waits(orchestrator, 0, 0))


async def test_nobody_waits_for_longer_than_requests_may(start_fakes: StartFakes) -> None:
    settings = {"max_requests": 1, "max_queue_wait_s": 0.1, "max_token_ms": 50.0}
    async with start_fakes(FakeVerifier(pass_s=0.005), **settings) as (client, orchestrator):
        running = await begin(client)
        with pytest.raises(RequestFailedError, match=r"had no place within 0\.1 s; 1 running") as caught:
            await client.generate(PROMPT, ENDLESS)
        assert caught.value.code == EXHAUSTED
        assert caught.value.retry_after_s
        assert orchestrator.service.tally.refused["long_wait"] == 1
        await eventually(lambda: waits(orchestrator, 1, 0))
        await running.aclose()  # type: ignore[attr-defined]


async def test_a_cancelled_call_leaves_the_queue_and_frees_its_place_there(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier(pass_s=0.005)
    async with start_fakes(verifier, max_requests=1, max_queued=1) as (client, orchestrator):
        running = await begin(client)
        stream = client.stream(PROMPT, ENDLESS)
        waiting = asyncio.create_task(anext(aiter(stream)))
        await eventually(lambda: waits(orchestrator, 1, 1))
        stream.cancel()
        await asyncio.wait({waiting})
        await eventually(lambda: waits(orchestrator, 1, 0))
        next_one = asyncio.create_task(client.generate(PROMPT, Options(max_tokens=5, seed=2)))
        await eventually(lambda: waits(orchestrator, 1, 1))
        await running.aclose()  # type: ignore[attr-defined]
        assert list((await next_one).token_ids) == plain(babble, PROMPT, 5, 2)
        await eventually(lambda: waits(orchestrator, 0, 0))
    assert len(verifier.opened) == 2


@pytest.mark.parametrize("by", ["client", "server"])
async def test_a_waiting_request_keeps_its_deadline(by: str, start_fakes: StartFakes) -> None:
    verifier = FakeVerifier(pass_s=0.01)
    settings = {"default_timeout_s": 0.3} if by == "server" else {}
    async with start_fakes(verifier, max_requests=1, **settings) as (client, orchestrator):
        running = await begin(client)
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=PROMPT))
        started_s = time.monotonic()
        with pytest.raises(RequestFailedError) as caught:
            await client.send(request, 0.2 if by == "client" else None)  # type: ignore[arg-type]
        assert caught.value.code == grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0.15 < time.monotonic() - started_s < 2.0
        await eventually(lambda: orchestrator.service.admission.num_waiting == 0)
        assert len(verifier.opened) == 1
        if by == "client":
            await running.aclose()  # type: ignore[attr-defined]


async def test_a_wrong_request_is_told_so_without_waiting(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(pass_s=0.01), max_requests=1) as (client, orchestrator):
        running = await begin(client)
        with pytest.raises(RequestFailedError) as caught:
            await client.generate(PROMPT, Options(temperature=-1.0), timeout_s=2.0)
        assert caught.value.fields == ("sampling.temperature",)
        assert waits(orchestrator, 1, 0)
        await running.aclose()  # type: ignore[attr-defined]


async def test_a_request_that_cannot_make_its_deadline_is_refused_at_once(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(pass_s=0.002), max_requests=1) as (client, orchestrator):
        options = Options(max_tokens=20, seed=1, ignore_eos=True)
        # Sixteen at least have been seen to go one after another, while others waited.
        calls = [asyncio.create_task(client.generate(PROMPT, options)) for _ in range(60)]
        await eventually(lambda: sum(call.done() for call in calls) >= 18)
        assert orchestrator.service.admission.num_waiting > 20
        with pytest.raises(RequestFailedError, match="at the best recent throughput") as caught:
            await client.generate(PROMPT, options, timeout_s=0.3)
        assert caught.value.code == EXHAUSTED
        assert caught.value.retry_after_s is not None
        assert caught.value.retry_after_s > 0.1
        for completion in await asyncio.gather(*calls):
            assert list(completion.token_ids) == plain(babble, PROMPT, 20, 1)


async def test_a_flood_of_one_tenant_does_not_keep_another_waiting(start_fakes: StartFakes) -> None:
    """Places become free when the test says so, and the flood keeps the queue full."""
    verifier = FakeVerifier(gates={seed: asyncio.Event() for seed in range(100, 128)})
    seeds = iter(verifier.gates)
    calls: dict[int, asyncio.Task[Completion]] = {}

    def options(seed: int) -> Options:
        return Options(max_tokens=20, seed=seed, ignore_eos=True)

    def opened() -> list[int]:
        return [opening.sampling.seed for opening in verifier.opened]

    async with start_fakes(verifier, max_requests=2, max_queued=20) as (flooding, orchestrator):

        async def flood(num_calls: int) -> None:
            for seed in itertools.islice(seeds, num_calls):
                calls[seed] = asyncio.create_task(flooding.generate(PROMPT, options(seed)))
            await eventually(lambda: waits(orchestrator, 2, 20))

        await flood(22)
        async with Client(flooding.address, tenant="calm") as calm:
            for turn in range(4):
                call = asyncio.create_task(calm.generate(PROMPT, options(1), timeout_s=20.0))
                # The queue is full, and makes room for it: one of the flood is sent away, as one was let through.
                await eventually(lambda turn=turn: sum(one.done() for one in calls.values()) > 2 * turn)
                await eventually(lambda turn=turn: len(verifier.opened) == 2 * turn + 2)
                assert waits(orchestrator, 2, 20)
                # The place that becomes free now is its own, and the flood gets it back.
                next(gate for seed in opened() if (gate := verifier.gates.get(seed)) and not gate.is_set()).set()
                assert list((await call).token_ids) == plain(babble, PROMPT, 20, 1)
                await eventually(lambda: waits(orchestrator, 2, 18))
                if turn < 3:
                    await flood(2)
            assert [seed == 1 for seed in opened()[:9]] == [False, False, *[True, False] * 3, True]
            for gate in verifier.gates.values():
                gate.set()
            await asyncio.wait(calls.values(), timeout=20.0)
    errors = [error for one in calls.values() if isinstance(error := one.exception(), RequestFailedError)]
    assert len(errors) == 4
    assert all(error.code == EXHAUSTED and error.retry_after_s for error in errors)
    assert all("needed for other tenants" in str(error) for error in errors)
    for seed, one in calls.items():
        if not one.exception():
            assert list(one.result().token_ids) == plain(babble, PROMPT, 20, seed)


async def test_weights_share_the_places(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier(pass_s=0.002)
    settings = {"max_requests": 1, "tenant_weights": (("gold", 3),)}
    async with start_fakes(verifier, **settings) as (client, orchestrator):
        running = await begin(client, Options(max_tokens=300, seed=99, ignore_eos=True))
        async with Client(client.address, tenant="gold") as gold, Client(client.address, tenant="tin") as tin:
            calls = []
            for _ in range(6):
                for one, seed in ((tin, 10), (gold, 20)):
                    options = Options(max_tokens=2, seed=seed, ignore_eos=True)
                    calls.append(asyncio.create_task(one.generate(PROMPT, options)))
                    await eventually(lambda: waits(orchestrator, 1, len(calls)))
            await running.aclose()  # type: ignore[attr-defined]
            await asyncio.gather(*calls)
    order = ["gold" if opening.sampling.seed == 20 else "tin" for opening in verifier.opened[1:]]
    assert order == ["tin", "gold", "gold", "gold", "tin", "gold", "gold", "gold", "tin", "tin", "tin", "tin"]


async def test_a_tenants_name_has_a_limit(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier()) as (client, _):
        async with Client(client.address, tenant="x" * 128) as longest:
            assert len((await longest.generate(PROMPT, Options(max_tokens=2))).token_ids) == 2
        async with Client(client.address, tenant="x" * 129) as too_long:
            with pytest.raises(RequestFailedError) as caught:
                await too_long.generate(PROMPT, Options(max_tokens=2))
    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.fields == ("x-tenant-id",)


async def test_the_verifiers_refusal_names_the_time_that_our_own_requests_show(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier(pass_s=0.005)
    async with start_fakes(verifier, max_requests=1) as (client, _):
        done = await client.generate(PROMPT, Options(max_tokens=60, seed=1, ignore_eos=True))
        verifier.fails_with = EXHAUSTED.value[0]
        with pytest.raises(RequestFailedError) as caught:
            await client.generate(PROMPT, ENDLESS)
    assert caught.value.code == EXHAUSTED
    # One that runs, and then this one: the place of the failed request is still its own.
    assert caught.value.retry_after_s == pytest.approx(done.timing.total_ms / 1000, rel=0.3)


async def test_a_prompt_is_read_until_its_first_token_and_grammars_are_not_waited_for(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(pass_s=0.01)) as (client, orchestrator):
        admission, requests = orchestrator.service.admission, []
        enter = admission.enter

        def entered(request: AdmissionRequest, time_left_s: float, num_tokens: int) -> Ticket:
            requests.append(request)
            return enter(request, time_left_s, num_tokens)

        admission.enter = entered  # type: ignore[method-assign]
        chunks = client.stream(PROMPT, ENDLESS)
        # Sent with the first look at it.
        first = asyncio.ensure_future(anext(aiter(chunks)))
        await eventually(lambda: admission.num_reading == 1)
        await first
        assert (admission.num_running, admission.num_reading) == (1, 0)
        chunks.cancel()
        with contextlib.suppress(RequestFailedError):
            await client.generate(PROMPT, Options(max_tokens=1, regex="a*"))
        assert [request.only_reads for request in requests] == [True, False]
        await eventually(lambda: waits(orchestrator, 0, 0))
        assert admission.num_reading == 0
