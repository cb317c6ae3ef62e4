"""A short form of `make kills`, and that it would find out what must not be."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from coppice.client import Client, Options
from tests.fakes import eventually
from tests.faults import kills
from tests.faults.deployment import deployed_here
from tests.faults.kills import KINDS, Kills, kill_run, killable
from tests.faults.resuming import Resumed, complete
from tests.faults.workload import Case
from tests.redis_server import NO_REDIS, PROGRAM
from tests.toy_target import babble, plain

PROMPT, SEED = (98, 99), 3
# How often. Those with a model take seconds to come back, and longer beside a load that leaves them no core.
KILLS = {"drafter": 1, "orchestrator": 2, "redis": 2, "verifier": 1}
PAUSE_S = {"drafter": 1.0}


def case(num_tokens: int) -> Case:
    options = Options(seed=SEED, max_tokens=num_tokens, ignore_eos=True)
    return Case(PROMPT, options, tuple(plain(babble, PROMPT, num_tokens, SEED)))


@pytest.mark.redis
@pytest.mark.skipif(PROGRAM is None, reason=NO_REDIS)
@pytest.mark.timeout(600)
async def test_killed_services_cost_no_request_no_token_and_no_block() -> None:
    async with killable() as deployment:
        results = {
            kind: await kill_run(deployment, kind, number, seed=1, pause_s=PAUSE_S.get(kind, 0.0))
            for kind, number in KILLS.items()
        }
    assert results.keys() == set(KINDS)
    for kind, result in results.items():
        assert result.violations == []
        assert (result.kills, result.wrong, result.lost, result.left) == (KILLS[kind], 0, 0, {})
        assert result.requests >= kills.NUM_CLIENTS
    # All clients were under way when it died.
    for kind in kills.INTERRUPTING:
        assert results[kind].resumed >= kills.NUM_CLIENTS


async def test_a_client_goes_on_behind_the_tokens_that_it_has() -> None:
    async with deployed_here(seed=0) as deployment, Client(deployment.address) as client:
        got = Resumed()
        going = asyncio.create_task(complete(client, case(300), got, 60.0))
        await eventually(lambda: len(got.tokens) >= 20)
        deployment.proxies["client"].cut()
        await going
    assert got.is_whole
    assert got.interruptions > 0
    assert got.tokens == list(case(300).tokens)


@pytest.mark.parametrize("fault", ["wrong", "lost", "resumed", "left"])
async def test_what_must_not_be_is_found_out(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, result = case(5), Kills()
    if fault == "lost":
        monkeypatch.setattr(kills, "REQUEST_S", 0.0)
    tokens = (*right.tokens[:-1], 0) if fault == "wrong" else right.tokens
    async with deployed_here(seed=0) as deployment, Client(deployment.address) as client:
        await kills._request(client, Case(right.prompt, right.options, tokens), result)
    if fault in ("wrong", "lost"):
        assert (result.wrong, result.lost) == ((1, 0) if fault == "wrong" else (0, 1))
        assert len(result.violations) == 1
        return
    assert result.violations == []
    result.resumed = int(fault == "resumed")
    if fault == "left":
        monkeypatch.setattr(kills, "RECOVERY_S", 0.3)

        async def count() -> Counter[str]:
            return Counter({"blocks of verifier": 2, "requests": 0})

        result.left = await kills._left(count)
    nothing = kills.Killable({}, None)  # type: ignore[arg-type]
    [violation] = kills._violations(nothing, "redis", result)
    assert ("2 blocks of verifier" if fault == "left" else "1 requests were interrupted") in violation
