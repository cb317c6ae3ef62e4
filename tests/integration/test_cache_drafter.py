"""Drafts of the prefix cache, on fakes: tokens stay the same, what comes again is faster, and tenants are apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from coppice.client import Client, Options
from coppice.completion import Completion
from coppice.core.tree import TokenTree, chain
from coppice.v1 import sampling_pb2
from orchestrator.app import Orchestrator
from tests.conftest import StartFakes
from tests.fakes import FakeDrafter, FakeVerifier, perfect, wrong
from tests.toy_target import VOCAB, Target, babble, plain

PROMPT = "def a prompt that is long enough: "
IDS = list(PROMPT.encode())
OPTIONS = Options(max_tokens=96, seed=5, ignore_eos=True)
Cached = tuple[Client, Orchestrator, FakeVerifier]


@pytest.fixture
async def alone(start_fakes: StartFakes) -> AsyncIterator[Cached]:
    verifier = rerooting()
    async with start_fakes(verifier, cache_drafter=True) as (client, orchestrator):
        yield client, orchestrator, verifier


def rerooting(target: Target = babble) -> FakeVerifier:
    """What comes during a pass is of use to the next, as with the real verifier; passes are slow enough for that."""
    return FakeVerifier(target, pass_s=0.003, reroots=True)


async def again(client: Client, orchestrator: Orchestrator, options: Options, prompt: str = PROMPT) -> Completion:
    """A completion, and then all that it leaves behind."""
    completion = await client.generate(prompt, options)
    assert orchestrator.cache is not None
    await orchestrator.cache.flushed()
    return completion


def said(options: Options, prompt: list[int] = IDS) -> tuple[int, ...]:
    return tuple(plain(babble, prompt, options.max_tokens or 0, options.seed or 0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_tokens_are_the_same_cold_warm_and_without_and_warm_takes_fewer_rounds(
    alone: Cached, temperature: float
) -> None:
    client, orchestrator, verifier = alone
    options = replace(OPTIONS, temperature=temperature)
    off = await again(client, orchestrator, replace(options, speculation="off"))
    cold = await again(client, orchestrator, options)
    warm = await again(client, orchestrator, options)
    assert off.token_ids == cold.token_ids == warm.token_ids == said(options)
    assert off.speculation.draft_tokens == 0
    assert warm.speculation.rounds < cold.speculation.rounds / 2
    assert warm.speculation.sources["cache"].accepted == warm.speculation.accepted_tokens > 0
    # Nobody waits for it.
    assert all(opening.linger_us == 0 for opening in verifier.opened)
    assert sum(verifier.lingers_us) < 1000 * len(verifier.lingers_us)


async def test_other_seeds_get_other_tokens_and_wrong_drafts_cost_none(alone: Cached) -> None:
    client, orchestrator, _ = alone
    for seed in range(6):
        options = replace(OPTIONS, temperature=1.0, seed=seed)
        assert (await again(client, orchestrator, options)).token_ids == said(options)


async def test_an_output_that_goes_over_familiar_text_profits_from_it_at_another_place(start_fakes: StartFakes) -> None:
    """What is remembered belongs to the last tokens, not to how many there were before."""
    verifier = rerooting(lambda tokens, seed: (tokens[-1] * 5 + tokens[-2] * 3 + 7) % 251)
    async with start_fakes(verifier, cache_drafter=True) as (client, orchestrator):
        first = await again(client, orchestrator, OPTIONS)
        middle = bytes(first.token_ids[:40])
        options = replace(OPTIONS, max_tokens=40)
        prompt = [*b"Something else. ", *middle]
        cold = await client.generate(prompt, replace(options, cache_salt="b"))
        warm = await client.generate(prompt, options)
    assert cold.token_ids == warm.token_ids == first.token_ids[40:80]
    assert warm.speculation.rounds < cold.speculation.rounds / 2


async def test_repetition_within_a_request_is_enough(start_fakes: StartFakes) -> None:
    text = b"spam and eggs, "
    verifier = rerooting(lambda tokens, seed: text[len(tokens) % len(text)])
    async with start_fakes(verifier, cache_drafter=True) as (client, _):
        completion = await client.generate([1, 2, 3], OPTIONS)
    assert bytes(completion.token_ids) == bytes(text[at % len(text)] for at in range(3, 99))
    assert completion.speculation.rounds < 48
    assert set(completion.speculation.sources) == {"cache"}


async def test_tenants_never_see_each_other(alone: Cached) -> None:
    client, orchestrator, verifier = alone
    cold = await again(client, orchestrator, replace(OPTIONS, cache_salt="a"))
    verifier.drafts.clear()
    other = await again(client, orchestrator, replace(OPTIONS, cache_salt="b"))
    assert other.token_ids == cold.token_ids
    # What has not been said yet is in no draft: all of them come from the request's own past.
    assert other.speculation.accepted_tokens == cold.speculation.accepted_tokens
    warm = await again(client, orchestrator, replace(OPTIONS, cache_salt="a"))
    assert warm.speculation.rounds < other.speculation.rounds / 2


@pytest.mark.parametrize("speculation", ["off", "small-lm"])
async def test_who_does_not_speculate_with_it_neither_reads_nor_writes(
    start_fakes: StartFakes, speculation: str
) -> None:
    async with start_fakes(rerooting(), FakeDrafter(), cache_drafter=True) as (
        client,
        orchestrator,
    ):
        without = replace(OPTIONS, speculation=speculation)
        for _ in range(2):
            completion = await again(client, orchestrator, without)
            assert "cache" not in completion.speculation.sources
        assert orchestrator.cache is not None
        assert orchestrator.cache.counts.reads == 0
        cold = await again(client, orchestrator, replace(OPTIONS, speculation="cache"))
        assert orchestrator.cache.counts.hits == 0
        warm = await again(client, orchestrator, replace(OPTIONS, speculation="cache"))
        assert set(warm.speculation.sources) == {"cache"}
        assert warm.speculation.rounds < cold.speculation.rounds / 2


async def test_sampled_trees_have_nothing_to_do_with_it(start_fakes: StartFakes) -> None:
    rules = (sampling_pb2.ACCEPTANCE_RULE_SAMPLE_AND_FOLLOW, sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL)
    verifier = FakeVerifier(acceptance_rules=rules)
    async with start_fakes(verifier, cache_drafter=True) as (client, orchestrator):
        options = replace(OPTIONS, temperature=1.0, acceptance="traversal")
        for _ in range(2):
            assert (await again(client, orchestrator, options)).speculation.draft_tokens == 0
        assert not verifier.drafts
        assert orchestrator.cache is not None
        assert orchestrator.cache.counts.reads == 0


async def test_it_is_listed_among_the_sources(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(), FakeDrafter(), cache_drafter=True) as (client, _):
        assert list((await client.model_info()).sources) == ["cache", "small-lm"]
    async with start_fakes(FakeVerifier(), cache_drafter=False) as (client, orchestrator):
        assert list((await client.model_info()).sources) == []
        assert orchestrator.cache is None


async def test_with_drafters_in_time_there_is_one_message_of_its_own_at_the_beginning(start_fakes: StartFakes) -> None:
    """While they have not answered yet. After that its tree is merged into theirs, or not sent at all."""
    for cached in (False, True):
        verifier, drafter = rerooting(), FakeDrafter(propose=wrong(after=1))
        async with start_fakes(verifier, drafter, cache_drafter=cached) as (client, _):
            for _ in range(3):
                completion = await client.generate(PROMPT, OPTIONS)
                assert completion.token_ids == said(OPTIONS)
        # Without nodes are those that tell the verifier not to wait for a last token.
        with_nodes = sum(len(draft.tree.token_ids) > 0 for draft in verifier.drafts)
        assert with_nodes <= drafter.num_trees + 3 * cached


async def test_beside_a_drafter_that_errs_it_adds_what_is_right(start_fakes: StartFakes) -> None:
    verifier, drafter = rerooting(), FakeDrafter(propose=wrong(after=1))
    async with start_fakes(verifier, drafter, cache_drafter=True) as (client, orchestrator):
        completions = [await again(client, orchestrator, OPTIONS) for _ in range(8)]
    assert all(completion.token_ids == said(OPTIONS) for completion in completions)
    assert completions[-1].speculation.rounds < 0.8 * completions[0].speculation.rounds
    sources = completions[-1].speculation.sources
    assert sources["cache"].accepted > sources["small-lm"].accepted > 0


async def test_what_is_remembered_does_not_wait_for_a_drafter_that_is_late(start_fakes: StartFakes) -> None:
    """As one is that still reads a prompt whose beginning the verifier has seen before."""
    rounds = []
    for cached in (False, True):
        verifier, drafter = rerooting(), FakeDrafter(propose=perfect(depth=6), delay_s=0.15)
        async with start_fakes(verifier, drafter, cache_drafter=cached, linger_ms=5.0) as (client, _):
            completions = [await client.generate(PROMPT, OPTIONS)]
            await asyncio.sleep(0.3)
            completions.append(await client.generate(PROMPT, OPTIONS))
        assert all(completion.token_ids == said(OPTIONS) for completion in completions)
        rounds.append([completion.speculation.rounds for completion in completions])
    (_, late), (_, remembered) = rounds
    assert remembered < late / 2


async def test_beside_a_drafter_that_is_right_it_changes_nothing(start_fakes: StartFakes) -> None:
    rounds = []
    for cached in (False, True):
        verifier, drafter = rerooting(), FakeDrafter(propose=perfect(depth=6))
        async with start_fakes(verifier, drafter, cache_drafter=cached, linger_ms=1000.0) as (client, _):
            rounds.append([(await client.generate(PROMPT, OPTIONS)).speculation.rounds for _ in range(3)])
    assert all(with_it <= without for without, with_it in zip(*rounds, strict=True))


async def test_when_the_drafter_is_gone_it_goes_on_alone(start_fakes: StartFakes) -> None:
    drafter = FakeDrafter(gives_up=True)
    async with start_fakes(rerooting(), drafter, cache_drafter=True) as (
        client,
        orchestrator,
    ):
        cold = await again(client, orchestrator, OPTIONS)
        warm = await again(client, orchestrator, OPTIONS)
    assert cold.token_ids == warm.token_ids == said(OPTIONS)
    assert warm.speculation.rounds < cold.speculation.rounds / 2


def nonsense(tokens: object, seed: int, max_nodes: int) -> TokenTree:
    return chain([VOCAB + 1])


async def test_a_drafter_that_sends_garbage_stays_contained(start_fakes: StartFakes) -> None:
    drafter = FakeDrafter(propose=nonsense)
    async with start_fakes(rerooting(), drafter, cache_drafter=True) as (
        client,
        orchestrator,
    ):
        for _ in range(2):
            completion = await again(client, orchestrator, OPTIONS)
            assert completion.token_ids == said(OPTIONS)
    assert set(completion.speculation.sources) == {"cache"}


async def test_a_cancelled_request_leaves_nothing_behind_but_what_it_said(alone: Cached) -> None:
    client, orchestrator, verifier = alone
    received = 0
    async for chunk in client.stream(PROMPT, OPTIONS):
        received += len(chunk.token_ids)
        if received > 30:
            break
    assert orchestrator.cache is not None
    while verifier.active:
        await again(client, orchestrator, replace(OPTIONS, max_tokens=1, cache_salt="other"))
    await orchestrator.cache.flushed()
    warm = await client.generate(PROMPT, replace(OPTIONS, max_tokens=30))
    assert warm.token_ids == said(replace(OPTIONS, max_tokens=30))
    assert warm.speculation.rounds < 15


async def test_every_limit_of_nodes_is_kept(alone: Cached) -> None:
    client, orchestrator, verifier = alone
    await again(client, orchestrator, OPTIONS)
    verifier.drafts.clear()
    await again(client, orchestrator, replace(OPTIONS, max_tokens=12))
    assert verifier.drafts
    assert all(draft.budget == 15 for draft in verifier.drafts)
    for draft in verifier.drafts:
        depths = TokenTree(tuple(draft.tree.token_ids), tuple(draft.tree.parents), tuple(draft.tree.log_probs)).depth
        assert draft.base_length + depths < len(IDS) + 12
