"""The adaptive planner between real services: it switches drafting on and off, and no token depends on it."""

from __future__ import annotations

import asyncio

import pytest

from coppice.client import Client, Options
from orchestrator.planner.fleet import FleetPlanner
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
        assert isinstance(orchestrator.service._planner, FleetPlanner)
        [planner] = orchestrator.service._planner.planners.values()
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
    assert all(one.pass_number > 20 for one in plans)
    # The one that was lost may not have measured a block before.
    assert plans[0].rate > 0
    assert not drafter.errors


async def test_a_drafter_that_adds_nothing_is_soon_asked_seldom_and_one_that_has_become_good_is_asked_again(
    start_fakes: StartFakes,
) -> None:
    # The good one's trees come second, so that what the other one adds is there in time.
    good = FakeDrafter(kind="good", propose=perfect(depth=2), delay_s=0.002)
    other = FakeDrafter(kind="other", propose=wrong())
    count = 200

    async def share_asked(client: Client, first_seed: int) -> float:
        """Trees of the other drafter for each of the good one, in three requests at once."""
        before = good.num_trees, other.num_trees
        seeds = range(first_seed, first_seed + 3)
        for seed, completion in zip(
            seeds,
            await asyncio.gather(*(client.generate(PROMPT, Options(max_tokens=count, seed=seed)) for seed in seeds)),
            strict=True,
        ):
            assert list(completion.token_ids) == plain(babble, PROMPT, count, seed=seed)
        return (other.num_trees - before[1]) / max(1, good.num_trees - before[0])

    # Passes that are said to take far longer than drafts and messages do, even on a busy machine: drafting always pays,
    # and what is left to choose is whom to ask.
    verifier = FakeVerifier(pass_s=0.001, pass_us=10_000_000)
    async with start_fakes(verifier, good, other, linger_ms=2000, planner="adaptive") as (client, _):
        for seed in range(0, 60, 3):
            if await share_asked(client, seed) <= 0.3:
                break
        else:
            pytest.fail("the drafter that adds nothing is asked as often as ever")
        other.propose = perfect(depth=4)
        for seed in range(60, 120, 3):
            if await share_asked(client, seed) >= 0.8:
                break
        else:
            pytest.fail("the drafter that has become good is not asked again")
    assert not good.errors
    assert not other.errors


@pytest.mark.parametrize("num_verifiers", [1, 2])
async def test_requests_that_force_sources_of_their_choice_teach_the_planner_nothing(
    start_fakes: StartFakes, num_verifiers: int
) -> None:
    good, bad = FakeDrafter(kind="good", propose=perfect(depth=2)), FakeDrafter(kind="bad", propose=wrong())
    verifiers = [FakeVerifier(pass_s=0.001) for _ in range(num_verifiers)]
    async with start_fakes(verifiers, good, bad, linger_ms=20, planner="adaptive") as (client, orchestrator):
        planner = orchestrator.service._planner
        assert isinstance(planner, FleetPlanner)
        plans = list(planner.planners.values())

        async def complete(speculation: str) -> None:
            completion = await client.generate(PROMPT, Options(max_tokens=120, seed=1, speculation=speculation))
            assert list(completion.token_ids) == plain(babble, PROMPT, 120, seed=1)
            assert completion.speculation.draft_tokens > 0

        for _ in range(4):
            await complete("bad")
        assert bad.num_trees > 200
        assert all(one.pass_number == 0 and not one.values.guessed for one in plans)
        assert all(one.mean_accepted == 0.0 for one in plans)
        await complete("auto")
        assert any(one.pass_number > 0 for one in plans)


async def test_a_slow_drafter_does_not_keep_a_quick_ones_tree(start_fakes: StartFakes) -> None:
    quick, slow = FakeDrafter(kind="quick"), FakeDrafter(kind="slow", delay_s=0.3)
    async with start_fakes(FakeVerifier(pass_s=0.001), quick, slow, linger_ms=2000) as (client, _):
        completion = await client.generate(PROMPT, Options(max_tokens=60, seed=1))
    assert list(completion.token_ids) == plain(babble, PROMPT, 60, seed=1)
    assert completion.speculation.mean_acceptance_length > 3
    # Twelve rounds or more; waiting for the slow one in each would take seconds.
    assert completion.timing.total_ms < 2000
