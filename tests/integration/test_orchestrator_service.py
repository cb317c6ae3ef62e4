"""The orchestrator against real servers of fakes: the output never depends on what the drafters do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice.client import Chunk, Client, Options, RequestFailedError
from coppice.core.errors import IncompatibleError, UnavailableError
from coppice.core.tree import EMPTY_TREE, TokenTree
from coppice.v1 import inference_pb2
from orchestrator.app import Orchestrator, running
from orchestrator.config import Config
from orchestrator.planner.adaptive import AdaptiveRequest
from orchestrator.request.drafting import BUDGETS_SENT
from tests.conftest import StartFakes
from tests.fakes import FakeDrafter, FakeVerifier, eventually, perfect, serving, wrong
from tests.toy_target import EOS, FINGERPRINT, VOCAB, babble, plain, script

PROMPT = [ord(character) for character in "def "]
COUNT = 60
OPTIONS = Options(max_tokens=COUNT, seed=7)
EXPECTED = plain(babble, PROMPT, COUNT, seed=7)


def outside_vocabulary(tokens: Sequence[int], seed: int, max_nodes: int) -> TokenTree:
    return TokenTree((VOCAB + 3,), (-1,), (0.0,))


def nothing(tokens: Sequence[int], seed: int, max_nodes: int) -> TokenTree:
    return EMPTY_TREE


def bushy(tokens: Sequence[int], seed: int, max_nodes: int) -> TokenTree:
    """More nodes than any budget: every letter, with the right one among them."""
    return TokenTree(tuple(range(97, 123)), (-1,) * 26, tuple(-0.1 * rank for rank in range(26)))


CASTS = {
    "none": (),
    "perfect": (FakeDrafter(),),
    "wrong": (FakeDrafter(propose=wrong()),),
    "half right": (FakeDrafter(propose=wrong(after=2)),),
    "empty trees": (FakeDrafter(propose=nothing),),
    "too many nodes": (FakeDrafter(propose=bushy),),
    "slow": (FakeDrafter(delay_s=0.03),),
    "silent": (FakeDrafter(silent=True),),
    "dies at once": (FakeDrafter(dies_after=0),),
    "dies again and again": (FakeDrafter(dies_after=4),),
    "gives up": (FakeDrafter(gives_up=True),),
    "foreign token ids": (FakeDrafter(propose=outside_vocabulary),),
    "another tokenizer": (FakeDrafter(tokenizer_fingerprint="other"),),
    "a kind of megabytes": (FakeDrafter(kind="k" * 3_000_000),),
    "a kind that is no name": (FakeDrafter(kind="k\n\x1b[2J"),),
    "two": (FakeDrafter(propose=wrong(after=1)), FakeDrafter(kind="diffusion", propose=perfect(depth=6))),
}


@pytest.mark.parametrize("cast", CASTS)
async def test_output_is_plain_decoding_whatever_the_drafters_do(start_fakes: StartFakes, cast: str) -> None:
    verifier = FakeVerifier()
    async with start_fakes(verifier, *CASTS[cast], linger_ms=8) as (client, orchestrator):
        completion = await client.generate(PROMPT, OPTIONS)
        assert list(completion.token_ids) == EXPECTED
        assert completion.text == bytes(EXPECTED).decode()
        assert completion.finish_reason == "length"
        assert completion.seed == 7
        assert completion.usage.prompt_tokens == len(PROMPT)
        assert completion.usage.completion_tokens == COUNT
        await nothing_left(orchestrator, verifier, *CASTS[cast])
    assert not [error for drafter in CASTS[cast] for error in drafter.errors]


async def nothing_left(orchestrator: Orchestrator, verifier: FakeVerifier, *drafters: FakeDrafter) -> None:
    await eventually(lambda: not verifier.active and not any(drafter.active for drafter in drafters))
    await eventually(lambda: orchestrator.service.num_requests == 0)
    assert orchestrator.verifiers.num_sequences == 0
    assert not any(client.num_sequences for client in orchestrator.drafters.clients)


async def test_statistics_add_up(start_fakes: StartFakes) -> None:
    drafter = FakeDrafter(propose=perfect(depth=3))
    async with start_fakes(FakeVerifier(), drafter, linger_ms=500, planner="fixed") as (client, _):
        completion = await client.generate(PROMPT, OPTIONS)
    stats, timing = completion.speculation, completion.timing
    assert stats.rounds == COUNT // 4
    assert stats.mean_acceptance_length == 4
    assert stats.accepted_tokens == COUNT - stats.rounds
    assert stats.draft_tokens == stats.sources["small-lm"].proposed
    assert stats.accepted_tokens == stats.sources["small-lm"].accepted
    assert sum(stats.rounds_accepted_by_depth) == stats.accepted_tokens
    assert stats.rounds_drafted_by_depth == stats.rounds_accepted_by_depth == (15, 15, 15)
    assert sum(one.count for one in timing.passes) == stats.rounds
    assert timing.forward_ms == pytest.approx(sum(one.total_ms for one in timing.passes))
    assert 0 < timing.ttft_ms <= timing.total_ms


async def test_a_conversation_is_the_prompt_that_the_template_makes_of_it(start_fakes: StartFakes) -> None:
    template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('begin with user') }}{% endif %}"
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}bot: "
    )
    talk = [{"role": "user", "content": "hi"}, {"role": "bot", "content": "yes?"}, {"role": "user", "content": "go"}]
    async with start_fakes(FakeVerifier(chat_template=template), FakeDrafter(propose=perfect(depth=3))) as (client, _):
        answer = await client.chat(talk, OPTIONS)
        plain = await client.generate("user: hi\nbot: yes?\nuser: go\nbot: ", OPTIONS)
        assert answer.token_ids == plain.token_ids
        assert answer.usage == plain.usage
        for messages, why in ((talk[1:], "begin with user"), ([], "must not be empty")):
            with pytest.raises(RequestFailedError, match=why) as refused:
                await client.chat(messages, OPTIONS)
            assert (refused.value.code, refused.value.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("messages",))
    async with start_fakes(FakeVerifier()) as (client, _):
        with pytest.raises(RequestFailedError, match="no chat template") as refused:
            await client.chat(talk, OPTIONS)
        assert refused.value.code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("speculation", ["auto", "off"])
async def test_near_ties_of_all_rounds_are_added_up(speculation: str, start_fakes: StartFakes) -> None:
    options = Options(max_tokens=COUNT, seed=1, speculation=speculation)
    async with start_fakes(FakeVerifier(near_ties=2), FakeDrafter()) as (client, _):
        fast = await client.generate(PROMPT, options)
    assert fast.speculation.near_ties == 2 * fast.speculation.rounds > 0
    assert fast.as_json()["speculation"]["near_ties"] == fast.speculation.near_ties
    async with start_fakes(FakeVerifier(), FakeDrafter()) as (client, _):
        strict = await client.generate(PROMPT, options)
    assert strict.speculation.near_ties == 0
    assert "near_ties" not in strict.as_json()["speculation"]


async def test_sources_are_told_apart(start_fakes: StartFakes) -> None:
    first = FakeDrafter(kind="a", propose=wrong(after=1, depth=2))
    second = FakeDrafter(kind="b", propose=wrong(after=0, depth=2))
    async with start_fakes(FakeVerifier(pass_s=0.03), first, second, linger_ms=500) as (client, _):
        both = await client.generate(PROMPT, Options(max_tokens=10, seed=1))
        only_b = await client.generate(PROMPT, Options(max_tokens=10, seed=1, speculation="b"))
    assert set(both.speculation.sources) <= {"a", "b"}
    assert set(only_b.speculation.sources) == {"b"}
    assert only_b.speculation.accepted_tokens == 0
    assert both.token_ids == only_b.token_ids


async def test_plain_decoding_asks_no_drafter_and_waits_for_none(start_fakes: StartFakes) -> None:
    verifier, drafter = FakeVerifier(), FakeDrafter()
    async with start_fakes(verifier, drafter) as (client, _):
        completion = await client.generate(PROMPT, Options(max_tokens=10, seed=7, speculation="off"))
        none_wanted = await client.generate(PROMPT, Options(max_tokens=10, seed=7, max_nodes=0))
    assert list(completion.token_ids) == list(none_wanted.token_ids) == EXPECTED[:10]
    assert completion.speculation.rounds == 10
    assert not drafter.opened
    assert not verifier.drafts
    assert {opening.linger_us for opening in verifier.opened} == {0}


@pytest.mark.parametrize(("row_multiple", "told"), [(0, 1), (4, 4)])
async def test_drafters_are_told_in_which_multiples_the_verifier_computes_rows(
    start_fakes: StartFakes, row_multiple: int, told: int
) -> None:
    drafter = FakeDrafter()
    async with start_fakes(FakeVerifier(row_multiple=row_multiple), drafter) as (client, _):
        await client.generate(PROMPT, Options(max_tokens=4, seed=7))
    assert [opening.row_multiple for opening in drafter.opened] == [told]


async def test_without_a_usable_drafter_the_verifier_is_told_not_to_wait(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier()
    async with start_fakes(verifier, FakeDrafter(dies_after=3), linger_ms=2000) as (client, _):
        async with asyncio.timeout(10):
            completion = await client.generate(PROMPT, OPTIONS)
    assert list(completion.token_ids) == EXPECTED
    assert any(draft.HasField("linger_us") and draft.linger_us == 0 for draft in verifier.drafts)


async def test_a_budget_is_kept_and_drafts_never_reach_past_the_end(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier()
    async with start_fakes(verifier, FakeDrafter(propose=bushy), max_nodes=5, linger_ms=500) as (client, _):
        await client.generate(PROMPT, Options(max_tokens=8, seed=7))
        await client.generate(PROMPT, Options(max_tokens=8, seed=7, max_nodes=2))
    # What is sent beyond the budget is for the verifier to re-root behind the outcome.
    assert max(len(draft.tree.token_ids) for draft in verifier.drafts) <= 5 * BUDGETS_SENT
    assert {draft.budget for draft in verifier.drafts} == {2, 5}
    assert all(draft.budget == 2 and len(draft.tree.token_ids) <= 2 * BUDGETS_SENT for draft in verifier.drafts[-3:])


async def test_a_drafter_that_comes_back_is_used_by_running_and_new_requests(start_fakes: StartFakes) -> None:
    verifier, drafter = FakeVerifier(pass_s=0.005), FakeDrafter()
    async with serving(verifier) as verifier_address:
        async with serving(drafter) as drafter_address:
            pass
        config = Config(
            verifier_address=verifier_address,
            drafter_addresses=(drafter_address,),
            linger_ms=200,
            connect_timeout_s=10,
            grace_s=0,
        )
        async with running(config) as orchestrator, Client(orchestrator.address) as client:
            assert orchestrator.drafters.connected_kinds() == ()
            alone = await client.generate(PROMPT, OPTIONS)
            async with serving(drafter, drafter_address):
                await eventually(lambda: orchestrator.drafters.connected_kinds() == ("small-lm",))
                # Forced, so that the planner's choice is not waited for.
                options = Options(max_tokens=300, seed=7, ignore_eos=True, speculation="small-lm")
                stream = client.stream(PROMPT, options)
                chunks = aiter(stream)
                await anext(chunks)
                await eventually(lambda: drafter.opened)
            await eventually(lambda: not orchestrator.drafters.connected_kinds())
            async with serving(drafter, drafter_address):
                async for _ in chunks:
                    pass
                running_one = stream.result()
                again = await client.generate(PROMPT, replace(OPTIONS, speculation="small-lm"))
    assert alone.speculation.draft_tokens == 0
    assert list(running_one.token_ids) == plain(babble, PROMPT, 300, seed=7)
    assert again.speculation.draft_tokens > 0
    # Once when it started, once again in the middle, once for the last request.
    assert len(drafter.opened) == 3
    assert len(drafter.opened[1].prompt_token_ids) > len(PROMPT)


@pytest.mark.parametrize("has_drafter", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize("drop_after", [1, 2, 5])
async def test_a_lost_verifier_stream_is_resumed_without_a_lost_or_repeated_token(
    start_fakes: StartFakes, has_drafter: bool, drop_after: int
) -> None:
    verifier = FakeVerifier(drops=3, drop_after=drop_after)
    drafters = [FakeDrafter(propose=wrong(after=1))] if has_drafter else []
    async with start_fakes(verifier, *drafters, linger_ms=20) as (client, orchestrator):
        completion = await client.generate(PROMPT, OPTIONS)
        await nothing_left(orchestrator, verifier, *drafters)
    assert list(completion.token_ids) == EXPECTED
    assert completion.text == bytes(EXPECTED).decode()
    assert len(verifier.opened) == 4
    assert [opening.resumed_tokens for opening in verifier.opened] == sorted(
        opening.resumed_tokens for opening in verifier.opened
    )
    assert {opening.sampling.seed for opening in verifier.opened} == {7}


async def test_an_output_that_ended_as_the_verifier_was_lost_is_finished_here(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier(target=script("hi", len(PROMPT)), drops=1, drop_after=3)
    async with start_fakes(verifier) as (client, _):
        completion = await client.generate(PROMPT, OPTIONS)
    assert list(completion.token_ids) == [*b"hi", EOS]
    assert completion.text == "hi"
    assert completion.finish_reason == "eos"


async def test_a_verifier_that_stays_away_makes_requests_fail_as_unavailable(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier(pass_s=0.01)
    async with serving(verifier) as address:
        context = running(Config(verifier_address=address, connect_timeout_s=10, grace_s=0, resume_s=0.2))
        orchestrator = await context.__aenter__()
        client = Client(orchestrator.address)
        stream = client.stream(PROMPT, Options(max_tokens=300, seed=7))
        chunks = aiter(stream)
        first = await anext(chunks)
        assert await health(orchestrator.address) == health_pb2.HealthCheckResponse.SERVING
    try:
        received = list(first.token_ids)
        with pytest.raises(RequestFailedError) as caught:
            await drain(chunks, received)
        assert caught.value.code == grpc.StatusCode.UNAVAILABLE
        assert received == plain(babble, PROMPT, len(received), seed=7)
        with pytest.raises(RequestFailedError) as caught:
            await client.generate(PROMPT, OPTIONS)
        assert caught.value.code == grpc.StatusCode.UNAVAILABLE
        assert await health(orchestrator.address) == health_pb2.HealthCheckResponse.NOT_SERVING
        async with serving(verifier, address):
            await eventually(lambda: orchestrator.verifiers.num_usable == 1)
            rest = Options(max_tokens=COUNT, seed=7, resume_token_ids=tuple(received))
            assert received + list((await client.generate(PROMPT, rest)).token_ids) == EXPECTED
    finally:
        await client.close()
        await context.__aexit__(None, None, None)


async def drain(chunks: AsyncIterator[Chunk], received: list[int]) -> None:
    async for chunk in chunks:
        received.extend(chunk.token_ids)


async def health(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(service="coppice.v1.InferenceService"))
    status: int = response.status
    return status


async def test_cancelling_reaches_both_back_ends(start_fakes: StartFakes) -> None:
    verifier, drafter = FakeVerifier(pass_s=0.01), FakeDrafter()
    async with start_fakes(verifier, drafter) as (client, orchestrator):
        stream = client.stream(PROMPT, Options(max_tokens=300))
        chunks = aiter(stream)
        await anext(chunks)
        assert verifier.active
        assert drafter.active
        stream.cancel()
        await nothing_left(orchestrator, verifier, drafter)
        assert verifier.num_closed == 1


@pytest.mark.parametrize("by", ["client", "server"])
async def test_deadlines_reach_both_back_ends(start_fakes: StartFakes, by: str) -> None:
    verifier, drafter = FakeVerifier(pass_s=0.05), FakeDrafter(propose=wrong())
    settings = {"default_timeout_s": 0.3} if by == "server" else {}
    async with start_fakes(verifier, drafter, **settings) as (client, orchestrator):
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=PROMPT))
        timeout_s = 0.3 if by == "client" else None
        with pytest.raises(RequestFailedError) as caught:
            await client.send(request, timeout_s)  # type: ignore[arg-type]
        assert caught.value.code == grpc.StatusCode.DEADLINE_EXCEEDED
        await nothing_left(orchestrator, verifier, drafter)


async def test_more_requests_than_admitted_are_told_when_to_retry(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(pass_s=0.02), max_requests=2, max_queued=0) as (client, orchestrator):
        streams = [client.stream(PROMPT, Options(max_tokens=200)) for _ in range(2)]
        chunks = [aiter(stream) for stream in streams]
        for one in chunks:
            await anext(one)
        with pytest.raises(RequestFailedError) as caught:
            await client.generate(PROMPT, OPTIONS)
        assert caught.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.retry_after_s == 1.0
        for stream in streams:
            stream.cancel()
        await eventually(lambda: orchestrator.service.num_requests == 0)
        assert len((await client.generate(PROMPT, OPTIONS)).token_ids) == COUNT


async def test_many_requests_share_the_streams(start_fakes: StartFakes) -> None:
    verifier, drafter = FakeVerifier(), FakeDrafter(propose=wrong(after=1))
    async with start_fakes(verifier, drafter, linger_ms=20) as (client, orchestrator):
        completions = await asyncio.gather(
            *(client.generate(PROMPT, Options(max_tokens=30, seed=seed)) for seed in range(12))
        )
        await nothing_left(orchestrator, verifier, drafter)
    for seed, completion in enumerate(completions):
        assert list(completion.token_ids) == plain(babble, PROMPT, 30, seed)


async def test_an_unset_seed_is_drawn_and_returned(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier()) as (client, _):
        first, second = [await client.generate(PROMPT, Options(max_tokens=20)) for _ in range(2)]
    assert first.seed != second.seed
    for completion in (first, second):
        assert list(completion.token_ids) == plain(babble, PROMPT, 20, completion.seed)


async def test_an_error_of_the_verifier_keeps_its_status_and_field(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier(fails_with=grpc.StatusCode.INVALID_ARGUMENT.value[0])
    async with start_fakes(verifier, FakeDrafter()) as (client, orchestrator):
        with pytest.raises(RequestFailedError, match=r"sampling\.top_k: no") as caught:
            await client.generate(PROMPT, OPTIONS)
        assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.fields == ("sampling.top_k",)
        await nothing_left(orchestrator, verifier)


async def test_model_information_names_the_connected_drafters(start_fakes: StartFakes) -> None:
    foreign = FakeDrafter(kind="foreign", tokenizer_fingerprint="other")
    async with start_fakes(FakeVerifier(), FakeDrafter(), foreign, max_nodes=9) as (client, _):
        info = await client.model_info()
    assert info.model == "toy"
    assert info.tokenizer_fingerprint == FINGERPRINT
    assert list(info.sources) == ["small-lm"]
    assert list(info.refusals) == ["drafter foreign: has another tokenizer than the target"]
    assert info.num_verifiers == 1
    assert info.max_nodes == 9
    assert info.vocab_size == VOCAB


async def test_a_required_drafter_with_another_tokenizer_stops_the_start(start_fakes: StartFakes) -> None:
    foreign = FakeDrafter(tokenizer_fingerprint="f" * 64)
    with pytest.raises(IncompatibleError, match="f" * 64) as caught:
        async with start_fakes(FakeVerifier(), foreign, require_drafters=True):
            pass
    assert FINGERPRINT in str(caught.value)


async def test_a_required_drafter_that_is_not_there_stops_the_start() -> None:
    async with serving(FakeVerifier()) as address:
        config = Config(
            verifier_address=address, drafter_addresses=("127.0.0.1:1",), require_drafters=True, connect_timeout_s=0.5
        )
        with pytest.raises(IncompatibleError, match=r"127\.0\.0\.1:1 is required but not connected"):
            async with running(config):
                pass


async def test_without_a_verifier_the_start_fails() -> None:
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1 was not reached within 0\.3 s"):
        async with running(Config(verifier_address="127.0.0.1:1", connect_timeout_s=0.3)):
            pass


async def test_what_cannot_be_learned_from_ends_no_output(
    start_fakes: StartFakes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*parts: object, **named: object) -> None:
        raise KeyError("source")

    monkeypatch.setattr(AdaptiveRequest, "round_over", fail)
    async with start_fakes(FakeVerifier(), FakeDrafter(propose=perfect(depth=2)), planner="adaptive") as (client, _):
        completion = await client.generate("x", Options(max_tokens=9, seed=1))
    assert list(completion.token_ids) == plain(babble, b"x", 9, 1)
    assert "the planner failed to learn from a round" in caplog.text


async def test_a_planner_that_fails_at_the_end_costs_no_output(
    start_fakes: StartFakes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: object) -> None:
        raise ValueError("a bug of ours")

    monkeypatch.setattr(AdaptiveRequest, "close", fail)
    drafters = FakeDrafter(propose=perfect(depth=2))
    async with start_fakes(FakeVerifier(), drafters, planner="adaptive") as (client, orchestrator):
        async with asyncio.timeout(10):
            completion = await client.generate("x", Options(max_tokens=9, seed=1))
        await eventually(lambda: orchestrator.service.num_requests == 0)
    assert list(completion.token_ids) == plain(babble, b"x", 9, 1)
    assert "the drafts of an output failed to close" in caplog.text
