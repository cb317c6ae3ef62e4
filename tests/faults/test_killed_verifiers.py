"""One of two verifier processes killed under load: every output is that of an undisturbed run."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from coppice.cli.child import Child
from coppice.client import Client, Options
from tests.tiny_checkpoint import write_tiny_llama

VOCAB = 61
NUM_TOKENS = 200
PROMPTS = [(4, 8, 15, 16, 23, number) for number in range(6)]
OPTIONS = Options(seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
START_S = 90.0
STOP_S = 10.0


@dataclass
class Services:
    """Two verifiers as processes of the test, and a client of the orchestrator before them."""

    verifiers: list[Child]
    client: Client


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    write_tiny_llama(tmp_path, vocab_size=VOCAB, max_context_tokens=512)
    common = {"LISTEN_ADDRESS": "127.0.0.1:0", "DEVICE": "cpu", "THREADS": "1", "KV_CACHE_MIB": "4"}
    async with contextlib.AsyncExitStack() as stack:
        verifiers = [Child("verifier", "verifier_svc", {**common, "MODEL": str(tmp_path)}, None) for _ in range(2)]
        for child in verifiers:
            await child.start()
            stack.push_async_callback(child.stop, STOP_S)
        addresses = [await child.ready(START_S) for child in verifiers]
        env = {"LISTEN_ADDRESS": "127.0.0.1:0", "VERIFIER_ADDRESS": ",".join(addresses)}
        orchestrator = Child("orchestrator", "orchestrator", env, None)
        await orchestrator.start()
        stack.push_async_callback(orchestrator.stop, STOP_S)
        client = await stack.enter_async_context(Client(await orchestrator.ready(START_S)))
        yield Services(verifiers, client)


@pytest.mark.processes
@pytest.mark.timeout(180)
async def test_a_killed_verifiers_outputs_go_on_with_the_same_tokens(services: Services) -> None:
    undisturbed = {
        temperature: [await generate(services.client, prompt, temperature) for prompt in PROMPTS]
        for temperature in (0.0, 1.0)
    }
    assert (await services.client.model_info()).num_verifiers == 2
    begun = asyncio.Event()
    calls = {
        temperature: [asyncio.create_task(stream(services.client, prompt, temperature, begun)) for prompt in PROMPTS]
        for temperature in (0.0, 1.0)
    }
    await begun.wait()
    killed = services.verifiers[0]._process
    assert killed is not None
    killed.send_signal(signal.SIGKILL)
    assert not any(call.done() for running in calls.values() for call in running)
    for temperature, running in calls.items():
        assert await asyncio.gather(*running) == undisturbed[temperature]
    assert (await services.client.model_info()).num_verifiers == 1
    assert await generate(services.client, PROMPTS[1], 1.0) == undisturbed[1.0][1]


async def generate(client: Client, prompt: tuple[int, ...], temperature: float) -> tuple[int, ...]:
    return (await client.generate(prompt, replace(OPTIONS, temperature=temperature), timeout_s=60)).token_ids


async def stream(client: Client, prompt: tuple[int, ...], temperature: float, begun: asyncio.Event) -> tuple[int, ...]:
    """The same as it comes; says when it has begun."""
    tokens: list[int] = []
    async for chunk in client.stream(prompt, replace(OPTIONS, temperature=temperature), timeout_s=60):
        tokens += chunk.token_ids
        begun.set()
    return tuple(tokens)
