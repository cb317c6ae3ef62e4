"""A network that is silent in one direction for 1 or 10 seconds: late answers at most, and nothing is left."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest

from tests.fakes import eventually
from tests.faults.deployment import Deployment, deployed_here
from tests.faults.proxy import CLEAN, Link
from tests.faults.workload import Ends, Load, draw_cases

SILENT = Link(stalled=True)
HOPS = ("client", "gateway", "verifier 1", "drafter 1")
# Requests go on without a drafter, or with another verifier.
SPARED = ("verifier 1", "drafter 1")
DIRECTIONS = {"there": (SILENT, CLEAN), "back": (CLEAN, SILENT)}
# Sooner than a silent peer is given up, so that no request waited for that.
NOTICED_S = 5.0
# The last request may have begun just before the end.
REST_S = 1.0


async def partition(hop: str, direction: str, seconds: float) -> tuple[Ends, int]:
    """How requests ended while a hop was silent and a little longer, and how many were completed meanwhile.

    The hop is silent for longer where requests go on without it and a busy machine completes none so soon.
    """
    async with deployed_here(seed=1) as deployment:
        cases = await draw_cases(deployment.address, 4, random.Random(1))
        load = Load(deployment.address, cases, 4, 1, deployment.http_address)
        running = asyncio.create_task(load.run())
        await eventually(lambda: load.ends.counts["completed"] >= 4)
        before = load.ends.counts["completed"]
        deployment.proxies[hop].shape(*DIRECTIONS[direction])
        await asyncio.sleep(seconds)
        if hop in SPARED:
            await eventually(lambda: load.ends.counts["completed"] > before, NOTICED_S)
        meanwhile = load.ends.counts["completed"] - before
        deployment.proxies[hop].shape()
        await asyncio.sleep(REST_S)
        load.stop()
        await running
        async with asyncio.timeout(20):
            await nothing_left(deployment)
    return load.ends, meanwhile


async def nothing_left(deployment: Deployment) -> None:
    while True:
        left: Any = deployment.left()
        if not any((await left).values()):
            return
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("seconds", [1.0, 10.0])
async def test_a_direction_that_is_silent_changes_no_token_and_leaves_nothing(seconds: float) -> None:
    kinds = list(itertools.product(HOPS, DIRECTIONS))
    found = await asyncio.gather(*(partition(hop, direction, seconds) for hop, direction in kinds))
    for (hop, direction), (ends, meanwhile) in zip(kinds, found, strict=True):
        assert not ends.violations, (hop, direction)
        assert ends.counts["completed"] > 8, (hop, direction)
        if hop in SPARED:
            assert meanwhile > 0, (hop, direction)
