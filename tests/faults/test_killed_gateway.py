"""A gateway that is killed takes its answers with it, and nothing else: a new one serves at once, nothing is left."""

from __future__ import annotations

import asyncio
import random

from coppice.client import Options
from tests.conftest import orchestrator_on_fakes
from tests.fakes import FakeDrafter, FakeVerifier, eventually
from tests.faults.deployment import Service
from tests.faults.workload import Case, Load
from tests.toy_target import babble, plain

NUM_REQUESTS = 8


async def test_a_killed_gateway_leaves_no_request_and_is_replaced() -> None:
    verifier = FakeVerifier(pass_s=0.05)
    async with orchestrator_on_fakes(verifier, FakeDrafter()) as (_, one):
        gateway = Service("gateway", "coppice.gateway", {"ORCHESTRATOR_ADDRESS": one.address})
        await gateway.start()
        try:
            case = Case(
                (98, 99), Options(seed=3, max_tokens=200, temperature=1.0), tuple(plain(babble, (98, 99), 200, 3))
            )
            load = Load(one.address, (case,), NUM_REQUESTS, 0, gateway.address)
            # Of this seed, none leaves by itself.
            running = [asyncio.create_task(load.http_request(case, random.Random(1))) for _ in range(NUM_REQUESTS)]
            await eventually(lambda: len(verifier.active) == NUM_REQUESTS)
            await gateway.kill()
            await asyncio.gather(*running)
            assert load.ends.counts == {"UNAVAILABLE": NUM_REQUESTS}
            await eventually(lambda: one.service.num_requests == 0 and not verifier.active)
            await gateway.start()
            await load.http_request(case, random.Random(1))
            assert load.ends.counts["completed"] == 1
            assert not load.ends.violations
        finally:
            await gateway.stop()
