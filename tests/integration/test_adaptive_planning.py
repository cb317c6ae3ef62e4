"""The adaptive planner between real services: it switches drafting on and off, and no token depends on it."""

from __future__ import annotations

import asyncio

import pytest

from coppice.client import Options
from orchestrator.planning.adaptive import AdaptivePlanner
from orchestrator.planning.fleet import FleetPlanner
from tests.conftest import StartFakes
from tests.fakes import FakeDrafter, FakeVerifier, eventually, perfect, wrong
from tests.toy_target import babble, plain

PROMPT = [ord(character) for character in "def "]


@pytest.mark.parametrize("num_requests", [1, 12])
@pytest.mark.parametrize("good", [True, False], ids=["good drafts", "bad drafts"])
async def test_output_is_plain_decoding_through_pauses_and_trials(
    start_fakes: StartFakes, num_requests: int, good: bool
) -> None:
    count = 160
    verifier = FakeVerifier(pass_s=0.001)
    drafter = FakeDrafter(propose=perfect(depth=2) if good else wrong(), delay_s=0.0005)
    async with start_fakes(verifier, drafter, linger_ms=20, planner="adaptive") as (client, orchestrator):
        options = [Options(max_tokens=count, seed=seed) for seed in range(num_requests)]
        completions = await asyncio.gather(*(client.generate(PROMPT, one) for one in options))
        for seed, completion in enumerate(completions):
            assert list(completion.token_ids) == plain(babble, PROMPT, count, seed=seed)
        rounds = sum(completion.speculation.rounds for completion in completions)
        planner = orchestrator.service._planner
        assert isinstance(planner, AdaptivePlanner)
        await eventually(lambda: planner.num_running == planner.num_newcomers == 0)
    # Pauses, at the least, have left some rounds without drafts.
    assert drafter.num_trees < rounds
    assert not drafter.errors


async def test_the_fixed_planner_asks_for_a_draft_in_every_round(start_fakes: StartFakes) -> None:
    drafter = FakeDrafter(propose=wrong())
    async with start_fakes(FakeVerifier(pass_s=0.001), drafter, linger_ms=200, planner="fixed") as (client, _):
        completion = await client.generate(PROMPT, Options(max_tokens=60, seed=3))
    # One behind the prompt and one behind each outcome but those of the last places, which the pass fills itself.
    assert drafter.num_trees >= completion.speculation.rounds - 2


async def test_each_of_several_verifiers_has_plans_of_its_own_and_what_is_lost_moves_with_its_request(
    start_fakes: StartFakes,
) -> None:
    count = 200
    verifiers = [FakeVerifier(pass_s=0.001), FakeVerifier(pass_s=0.004, drops=1, drop_after=90)]
    drafter = FakeDrafter(propose=perfect(depth=2), delay_s=0.0005)
    async with start_fakes(verifiers, drafter, linger_ms=20, planner="adaptive") as (client, orchestrator):
        planner = orchestrator.service._planner
        assert isinstance(planner, FleetPlanner)
        plans = list(planner.planners.values())
        options = [Options(max_tokens=count, seed=seed) for seed in range(8)]
        running = asyncio.gather(*(client.generate(PROMPT, one) for one in options))
        await eventually(lambda: all(one.num_begun == 4 for one in plans))
        for seed, completion in enumerate(await running):
            assert list(completion.token_ids) == plain(babble, PROMPT, count, seed=seed)
        await eventually(lambda: all(one.num_begun == one.num_running == one.num_newcomers == 0 for one in plans))
    assert verifiers[1].drops == 0
    assert all(one.pass_number > 20 and one.stance.is_known for one in plans)
    assert not drafter.errors
