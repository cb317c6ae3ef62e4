"""Two verifiers with a real model, one of which goes under load: outputs are those of the undisturbed run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import torch

from coppice.client import Client, Options
from coppice.net import rpc
from coppice.v1 import verifier_pb2_grpc
from orchestrator.app import running
from orchestrator.config import Config
from tests.fakes import eventually
from tests.tiny_checkpoint import write_tiny_llama
from verifier_svc.config import VerifierConfig
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.kv_cache import BLOCK_SIZE
from verifier_svc.engine.scheduler import SchedulerLimits
from verifier_svc.model.loading import load_probed_target
from verifier_svc.model.target_model import TargetInfo, TargetModel
from verifier_svc.service import VerifierServicer

VOCAB = 61
MAX_NODES = 8
NUM_TOKENS = 120
PROMPTS = [(4, 8, 15, 16, 23, seed) for seed in range(6)]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[TargetModel, TargetInfo]]:
    """The same checkpoint twice, each with a cache of its own."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("target")
    write_tiny_llama(directory, vocab_size=VOCAB, max_context_tokens=256)
    return [
        load_probed_target(VerifierConfig(model=str(directory), device="cpu", threads=1, kv_cache_mib=4))
        for _ in range(2)
    ]


@contextlib.asynccontextmanager
async def verifier(target: TargetModel, info: TargetInfo) -> AsyncIterator[tuple[str, Engine]]:
    """A real verifier; leaving the context kills it."""
    engine = Engine(target, info, SchedulerLimits(max_sequences=8, max_queued=8, prefill_chunk=64), MAX_NODES)
    engine.start()
    server = rpc.Server(["coppice.v1.VerifierService"])
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(VerifierServicer(engine, info, MAX_NODES), server.grpc)
    try:
        yield f"127.0.0.1:{await server.start('127.0.0.1:0')}", engine
    finally:
        await server.stop(0)
        # Its streams end soon after, and take their sequences with them.
        await eventually(lambda: target.cache.num_free_blocks == target.cache.num_blocks)
        await asyncio.to_thread(engine.stop)


async def outputs(client: Client, temperature: float) -> list[tuple[int, ...]]:
    calls = [
        client.generate(
            prompt, Options(max_tokens=NUM_TOKENS, temperature=temperature, seed=3, ignore_eos=True), timeout_s=60
        )
        for prompt in PROMPTS
    ]
    return [completion.token_ids for completion in await asyncio.gather(*calls)]


async def test_a_prompt_is_computed_where_its_beginning_was(targets: list[tuple[TargetModel, TargetInfo]]) -> None:
    families = [[3 + family] * (2 * BLOCK_SIZE) for family in range(4)]
    async with contextlib.AsyncExitStack() as stack:
        addresses = [(await stack.enter_async_context(verifier(*target)))[0] for target in targets]
        config = Config(verifier_address=",".join(addresses), connect_timeout_s=10, grace_s=0)
        orchestrator = await stack.enter_async_context(running(config))
        client = await stack.enter_async_context(Client(orchestrator.address))
        cached = [
            [
                (await client.generate([*family, turn], Options(max_tokens=2))).usage.cached_prompt_tokens
                for turn in (4, 5, 6)
            ]
            for family in families
        ]
    assert cached == [[0, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE]] * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_outputs_are_those_of_the_undisturbed_run(
    temperature: float, targets: list[tuple[TargetModel, TargetInfo]]
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        mortal = await stack.enter_async_context(contextlib.AsyncExitStack())
        first, dying = await mortal.enter_async_context(verifier(*targets[0]))
        second, surviving = await stack.enter_async_context(verifier(*targets[1]))
        config = Config(verifier_address=f"{first},{second}", connect_timeout_s=10, grace_s=0)
        orchestrator = await stack.enter_async_context(running(config))
        client = await stack.enter_async_context(Client(orchestrator.address))
        undisturbed = await outputs(client, temperature)
        counts = [engine.counts.num_tokens for engine in (dying, surviving)]
        assert counts == [NUM_TOKENS * len(PROMPTS) // 2] * 2

        again = asyncio.create_task(outputs(client, temperature))
        while dying.counts.num_tokens < counts[0] + 60:  # noqa: ASYNC110 - the engine sets no event of ours
            await asyncio.sleep(0)
        await mortal.aclose()
        assert await again == undisturbed
        # It went in the middle, and what it had not done was done by the other.
        assert dying.counts.num_tokens < 2 * counts[0]
        assert surviving.counts.num_tokens > 2 * counts[1]
        assert orchestrator.verifiers.num_sequences == 0
