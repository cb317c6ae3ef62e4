"""A drafter that sends trees unasked costs other requests little time, and no memory."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coppice.client import Client, Options
from tests.fakes import FakeDrafter, FakeVerifier, eventually, serving
from tests.faults.deployment import Service, free_port
from tests.faults.flooding_drafter import FLOODS, KIND
from tests.faults.processes import resident_mib
from tests.toy_target import babble, plain

ROOT = Path(__file__).resolve().parents[2]
PROMPT = list(b"a prompt of every request")
TOKENS = 40
NUM_REQUESTS = 10
# How many times as long the fastest request of another drafter may take, with room for a machine of two busy cores.
SLOWDOWN = 3.0
REFUSED = "drafter flood: sends trees that nobody asked for"
GROWTH_MIB = 200.0
# Until its process has started and has been refused.
PATIENCE_S = 120.0


@contextlib.asynccontextmanager
async def flooding(flood: str, port: int) -> AsyncIterator[None]:
    """A flooding drafter."""
    command = [sys.executable, "-m", "tests.faults.flooding_drafter", flood, f"127.0.0.1:{port}"]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        await process.wait()


async def answered(client: Client, drafter: str, seed: int) -> float:
    """A request with one drafter, answered right; its time in seconds."""
    begun_s = time.monotonic()
    options = Options(max_tokens=TOKENS, seed=seed, temperature=1.0, ignore_eos=True, speculation=drafter)
    answer = await client.generate(PROMPT, options, timeout_s=60)
    assert list(answer.token_ids) == plain(babble, PROMPT, TOKENS, seed)
    return time.monotonic() - begun_s


async def fastest_s(client: Client, beside: str) -> float:
    """Least time of requests with the good drafter, while others use a drafter of kind `beside`."""
    done = asyncio.Event()

    async def others() -> int:
        seeds = 0
        while not done.is_set():
            await answered(client, beside, 1000 + seeds)
            seeds += 1
        return seeds

    running = asyncio.create_task(others())
    times = [await answered(client, "small-lm", seed) for seed in range(NUM_REQUESTS)]
    done.set()
    assert await running > 0
    return min(times)


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_drafter_that_floods_costs_others_little(flood: str) -> None:
    verifier, good, port = FakeVerifier(pass_s=0.005, reroots=True), FakeDrafter(), free_port()
    async with serving(verifier) as verifier_address, serving(good) as good_address:
        drafters = f"{good_address},127.0.0.1:{port}"
        env = {"VERIFIER_ADDRESS": verifier_address, "DRAFTER_ADDRESSES": drafters, "CONNECT_TIMEOUT_S": "2"}
        orchestrator = Service("orchestrator", "orchestrator", {**env, "PLANNER": "fixed", "LOG_LEVEL": "INFO"})
        await orchestrator.start()
        try:
            async with Client(orchestrator.address) as client:
                await answered(client, "small-lm", 0)
                alone_s = await fastest_s(client, "off")
                before_mib = resident_mib(orchestrator.pid)
                async with flooding(flood, port):
                    # Until it is refused, and with it refused.
                    async with asyncio.timeout(PATIENCE_S):
                        seed = 0
                        while REFUSED not in (await client.model_info()).refusals:
                            seed += 1
                            is_known = KIND in (await client.model_info()).sources
                            kinds = ["small-lm", KIND] if is_known else ["small-lm"]
                            await asyncio.gather(*[answered(client, kind, seed) for kind in kinds])
                    beside_s = await fastest_s(client, KIND)
                    growth_mib = resident_mib(orchestrator.pid) - before_mib
                assert beside_s < SLOWDOWN * alone_s
                assert growth_mib < GROWTH_MIB
                await eventually(lambda: not verifier.active and not good.active)
                metrics = await orchestrator.metrics()
                assert metrics["coppice_orchestrator_num_requests_running"] == 0
                assert not orchestrator.alarms.heard
        finally:
            await orchestrator.stop()
