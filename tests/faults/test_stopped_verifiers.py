"""One of two verifier processes stopped under load, and going on: no request is lost, and it serves again."""

from __future__ import annotations

import asyncio
import random
import signal

import pytest

from coppice.client import Client
from tests.fakes import eventually
from tests.faults.deployment import Deployment, deployed
from tests.faults.test_partitions import nothing_left
from tests.faults.workload import Load, draw_cases
from tests.redis_server import needs_redis

pytestmark = [*needs_redis, pytest.mark.processes]

# By then a silent verifier is given up: after 8 s by keepalive alone, and some for a busy machine. A figure of its own,
# since from the constant of keepalive it would grow with it. During the last stop, new connections to it fail, too.
GIVEN_UP_S = 15.0
STOPS_S = (1.0, 10.0, 25.0)
STOPPED = "verifier 1"
# Connections are tried again at least every 5 s.
NOTICED_S = 30.0
ROUNDS = "coppice_verifier_rounds_total"
# Requests that were completed and those whose clients left.
UNHARMED = {"completed", "left by its client"}


async def rounds(deployment: Deployment) -> float:
    return (await deployment.services[STOPPED].metrics())[ROUNDS]


async def num_verifiers(client: Client, number: int, seconds: float = NOTICED_S) -> None:
    """Wait until the orchestrator has so many."""
    async with asyncio.timeout(seconds):
        while True:
            if (await client.model_info()).num_verifiers == number:
                return
            await asyncio.sleep(0.1)


async def serves(deployment: Deployment) -> None:
    """Wait until the stopped verifier has had rounds since now."""
    before = await rounds(deployment)
    async with asyncio.timeout(NOTICED_S):
        while True:
            if await rounds(deployment) >= before + 10:
                return
            await asyncio.sleep(0.1)


@pytest.mark.timeout(700)
async def test_a_stopped_verifier_costs_no_request_and_serves_again() -> None:
    async with deployed(seed=5) as deployment, Client(deployment.address) as client:
        cases = await draw_cases(deployment.address, 12, random.Random(5))
        load = Load(deployment.address, cases, 8, 5, deployment.http_address)
        counts, running = load.ends.counts, asyncio.create_task(load.run())
        stopped = deployment.services[STOPPED]
        for seconds in STOPS_S:
            await num_verifiers(client, 2)
            await serves(deployment)
            stopped.send(signal.SIGSTOP)
            before, over = counts["completed"], asyncio.create_task(asyncio.sleep(seconds))
            if seconds > GIVEN_UP_S:
                await num_verifiers(client, 1, GIVEN_UP_S)
                # More than what was under way.
                await eventually(lambda before=before: counts["completed"] > before + 16, NOTICED_S)  # type: ignore[misc]
            await over
            if seconds <= 1:
                assert (await client.model_info()).num_verifiers == 2
            stopped.send(signal.SIGCONT)
        await num_verifiers(client, 2)
        await serves(deployment)
        load.stop()
        await running
        assert not load.ends.violations
        assert counts.keys() <= UNHARMED
        assert load.ends.num_http > 10
        async with asyncio.timeout(NOTICED_S):
            await nothing_left(deployment)
        # It alone has the right tokens.
        await deployment.services["verifier 2"].kill()
        await num_verifiers(client, 1)
        for case in cases:
            assert (await client.generate(case.prompt, case.options, timeout_s=60)).token_ids == case.tokens
        assert not any(service.has_crashed or service.alarms.heard for service in deployment.services.values())
