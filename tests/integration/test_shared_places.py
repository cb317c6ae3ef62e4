"""Connections beside each other: what one asks for does not keep another waiting, and no token of either changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest

from coppice.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from orchestrator.app import Orchestrator
from tests.conftest import StartFakes
from tests.fakes import FakeDrafter, FakeVerifier, eventually, wrong
from tests.toy_target import babble, plain

PROMPT = [ord(character) for character in "def "]
COUNT = 80
Call = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


@contextlib.asynccontextmanager
async def connection(orchestrator: Orchestrator, peer: str) -> AsyncIterator[Connection]:
    """A connection of its own. The guard in front of gRPC says which; where there is none, it says so itself."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(orchestrator.address, options=options) as channel:
        yield Connection(channel, peer)


class Connection:
    def __init__(self, channel: grpc.aio.Channel, peer: str) -> None:
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._metadata = (("x-coppice-peer", peer),)
        # How long each request of it waited for its place.
        self.door_ms: list[float] = []

    async def tokens(self, max_tokens: int, seed: int, num_outputs: int = 1, tenant: str = "") -> list[list[int]]:
        """Tokens of each output."""
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=PROMPT),
            sampling=sampling_pb2.SamplingParams(seed=seed, temperature=1.0),
            stopping=sampling_pb2.StoppingOptions(max_tokens=max_tokens, ignore_eos=True),
            num_outputs=num_outputs,
        )
        tokens: list[list[int]] = [[] for _ in range(num_outputs)]
        metadata = (*self._metadata, ("x-tenant-id", tenant))
        async for message in self._stub.Generate(request, metadata=metadata, timeout=60):
            tokens[message.output_index].extend(message.token_ids)
            if message.HasField("timing"):
                self.door_ms.append(message.timing.door_ms)
        return tokens


@pytest.mark.parametrize("num_outputs", [1, 3])
@pytest.mark.parametrize("shared_block_tokens", [0, 2], ids=["all at once", "the first first"])
async def test_a_newcomer_waits_for_nobody_and_nobody_loses_a_token(
    start_fakes: StartFakes, num_outputs: int, shared_block_tokens: int
) -> None:
    verifier = FakeVerifier(pass_s=0.004, shared_block_tokens=shared_block_tokens)
    drafter = FakeDrafter(propose=wrong(after=2))
    settings = {"max_requests": 12, "max_queued": 24, "shared_places": 4, "linger_ms": 5}
    async with (
        start_fakes(verifier, drafter, **settings) as (_, orchestrator),
        connection(orchestrator, "127.0.0.1:1") as greedy,
        connection(orchestrator, "127.0.0.1:2") as calm,
    ):
        admission = orchestrator.service.admission
        numbers = range(30 // num_outputs)
        # Names of tenants gain nothing.
        calls = [
            asyncio.create_task(greedy.tokens(COUNT, number, num_outputs, tenant=f"tenant {number % 4}"))
            for number in numbers
        ]
        await eventually(lambda: admission.num_running == 12)
        most_paused = 0
        for _ in range(5):
            one = asyncio.create_task(calm.tokens(2, 7))
            while not one.done():
                most_paused = max(most_paused, admission.num_paused)
                await asyncio.sleep(0.002)
            assert one.result() == [plain(babble, PROMPT, 2, 7)]
        assert most_paused >= 12 - max(2, num_outputs)
        # Some of the others still wait for their first places, and what had places goes on.
        assert not all(call.done() for call in calls)
        assert max(calm.door_ms) < 50
        for number, call in zip(numbers, calls, strict=True):
            outputs = await call
            assert outputs[0] == plain(babble, PROMPT, COUNT, number)
        await eventually(lambda: not verifier.active and not orchestrator.verifiers.num_sequences)
        assert (admission.num_running, admission.num_waiting, admission.num_paused) == (0, 0, 0)
    assert not drafter.errors


async def test_what_is_paused_is_freed_when_its_call_is_cancelled(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier(pass_s=0.01)
    async with (
        start_fakes(verifier, FakeDrafter(), shared_places=2) as (_, orchestrator),
        connection(orchestrator, "127.0.0.1:1") as greedy,
        connection(orchestrator, "127.0.0.1:2") as calm,
    ):
        admission = orchestrator.service.admission
        calls = [asyncio.create_task(greedy.tokens(300, number)) for number in range(6)]
        await eventually(lambda: len(verifier.active) == 6)
        staying = asyncio.create_task(calm.tokens(300, 7))
        await eventually(lambda: admission.num_paused == 5)
        await eventually(lambda: len(verifier.active) == 2)
        for call in calls:
            call.cancel()
        await eventually(lambda: (admission.num_running, admission.num_waiting, admission.num_paused) == (1, 0, 0))
        staying.cancel()
        await eventually(lambda: not verifier.active and not orchestrator.verifiers.num_sequences)


async def test_one_connection_alone_has_all_places(start_fakes: StartFakes) -> None:
    async with (
        start_fakes(FakeVerifier(pass_s=0.005), shared_places=2) as (_, orchestrator),
        connection(orchestrator, "127.0.0.1:1") as alone,
    ):
        admission = orchestrator.service.admission
        # Long enough that none completes before the last has begun.
        calls = [asyncio.create_task(alone.tokens(2000, number)) for number in range(40)]
        await eventually(lambda: admission.num_running == 40)
        assert admission.num_paused == 0
        for call in calls:
            call.cancel()
        await eventually(lambda: admission.num_running == 0)
