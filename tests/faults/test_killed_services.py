"""Services killed under a running request, with the real models: the tokens are those of an undisturbed run."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest
import pytest_asyncio

from coppice.checkpoints.bundled import MODELS
from coppice.cli.child import Child
from coppice.client import Client, Options

PROMPT = "class Queue:\n    def __init__(self, size):\n"
OPTIONS = Options(temperature=1.0, seed=3, max_tokens=160, ignore_eos=True)
# On a busy machine the planner may have left drafting off.
DRAFTED = replace(OPTIONS, speculation="small-lm")
START_S = 90.0
STOP_S = 10.0

# A drafter that comes too late would not be missed.
pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]


@dataclass
class Services:
    """Verifier, drafter and orchestrator as processes of the test."""

    verifier: Child
    drafter: Child
    client: Client

    def send(self, child: Child, number: signal.Signals) -> None:
        """Send a signal to a service."""
        assert child._process is not None
        child._process.send_signal(number)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services() -> AsyncIterator[Services]:
    common = {"LISTEN_ADDRESS": "127.0.0.1:0", "DEVICE": "cpu", "THREADS": "1"}
    verifier = Child("verifier", "verifier_svc", {**common, "MODEL": str(MODELS / "target")}, None)
    drafter = Child("drafter", "drafter_svc", {**common, "MODEL": str(MODELS / "small-lm")}, None)
    async with contextlib.AsyncExitStack() as stack:
        for child in (verifier, drafter):
            await child.start()
            stack.push_async_callback(child.stop, STOP_S)
        env = {
            "LISTEN_ADDRESS": "127.0.0.1:0",
            "VERIFIER_ADDRESS": await verifier.ready(START_S),
            "DRAFTER_ADDRESSES": await drafter.ready(START_S),
        }
        orchestrator = Child("orchestrator", "orchestrator", env, None)
        await orchestrator.start()
        stack.push_async_callback(orchestrator.stop, STOP_S)
        client = await stack.enter_async_context(Client(await orchestrator.ready(START_S)))
        yield Services(verifier, drafter, client)


async def interrupted(
    running: Services, number: signal.Signals, after_tokens: int, options: Options = OPTIONS
) -> list[int]:
    """A completion during which the drafter gets a signal."""
    stream = running.client.stream(PROMPT, options)
    tokens: list[int] = []
    sent = False
    async for chunk in stream:
        tokens += chunk.token_ids
        if not sent and len(tokens) >= after_tokens:
            running.send(running.drafter, number)
            sent = True
    assert sent
    return tokens


@pytest.mark.timeout(180)
async def test_a_drafter_that_hangs_costs_speed_only(services: Services) -> None:
    undisturbed = await services.client.generate(PROMPT, OPTIONS)
    try:
        assert await interrupted(services, signal.SIGSTOP, after_tokens=30) == list(undisturbed.token_ids)
        silent = await services.client.generate(PROMPT, OPTIONS)
    finally:
        services.send(services.drafter, signal.SIGCONT)
    assert silent.token_ids == undisturbed.token_ids
    # What was drafted, the orchestrator remembered.
    assert set(silent.speculation.sources) <= {"cache"}
    # Most rounds did not wait: a few tried again whether the drafter was back.
    assert silent.timing.linger_ms < silent.timing.total_ms / 2
    again = await services.client.generate(PROMPT, OPTIONS)
    assert again.token_ids == undisturbed.token_ids


@pytest.mark.timeout(180)
async def test_a_killed_drafter_costs_no_token_and_later_requests_are_served(services: Services) -> None:
    """The last one here: the drafter stays dead."""
    undisturbed = await services.client.generate(PROMPT, DRAFTED)
    assert undisturbed.speculation.accepted_tokens > 0
    assert await interrupted(services, signal.SIGKILL, after_tokens=30, options=DRAFTED) == list(undisturbed.token_ids)
    without = await services.client.generate(PROMPT, OPTIONS)
    assert without.token_ids == undisturbed.token_ids
    # What is drafted now, the orchestrator remembers.
    assert set(without.speculation.sources) <= {"cache"}
