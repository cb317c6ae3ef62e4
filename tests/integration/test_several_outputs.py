"""Several outputs for one prompt: each is what a request of its own would give, and they live and die together."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest

from coppice.client import Options, RequestFailedError
from coppice.core.sampling import output_seed
from orchestrator.app import Orchestrator
from tests.conftest import StartFakes
from tests.fakes import FakeDrafter, FakeVerifier, eventually, wrong
from tests.toy_target import babble, plain

PROMPT = [ord(character) for character in "def "]
OPTIONS = Options(max_tokens=30, seed=7, num_outputs=3)
SEEDS = [output_seed(7, index) for index in range(3)]


async def nothing_left(orchestrator: Orchestrator, verifier: FakeVerifier, *drafters: FakeDrafter) -> None:
    await eventually(lambda: not verifier.active and not any(drafter.active for drafter in drafters))
    await eventually(lambda: orchestrator.service.num_requests == 0)
    assert orchestrator.verifiers.num_sequences == 0
    assert not any(client.num_sequences for client in orchestrator.drafters.clients)


@pytest.mark.parametrize("shared_block_tokens", [0, 2], ids=["all at once", "the first first"])
@pytest.mark.parametrize("drops", [0, 2], ids=["one stream", "a stream that is lost twice"])
async def test_each_is_the_output_of_a_request_with_its_seed(
    start_fakes: StartFakes, shared_block_tokens: int, drops: int
) -> None:
    verifier = FakeVerifier(drops=drops, shared_block_tokens=shared_block_tokens)
    drafter = FakeDrafter(propose=wrong(after=2))
    async with start_fakes(verifier, drafter, linger_ms=20) as (client, orchestrator):
        outputs = await client.generate_all(PROMPT, replace(OPTIONS, top_log_probs=1))
        await nothing_left(orchestrator, verifier, drafter)
        for output, seed in zip(outputs, SEEDS, strict=True):
            alone = await client.generate(PROMPT, Options(max_tokens=30, seed=seed, top_log_probs=1))
            assert output.seed == alone.seed == seed
            assert output.text == alone.text
            assert output.token_ids == alone.token_ids == tuple(plain(babble, PROMPT, 30, seed))
            assert output.log_probs == alone.log_probs
            assert output.finish_reason == alone.finish_reason == "length"
            assert output.usage == alone.usage
            assert 0 < output.speculation.rounds <= 30
            assert 0 < output.timing.ttft_ms <= output.timing.total_ms
    assert len({output.token_ids for output in outputs}) == 3
    assert len({output.request_id for output in outputs}) == 1


async def test_chunks_name_their_output(start_fakes: StartFakes) -> None:
    said: list[list[int]] = [[], [], []]
    async with start_fakes(FakeVerifier()) as (client, _):
        stream = client.stream(PROMPT, OPTIONS)
        async for chunk in stream:
            said[chunk.output_index].extend(chunk.token_ids)
        with pytest.raises(RuntimeError, match="3 outputs"):
            stream.result()
    assert said == [plain(babble, PROMPT, 30, seed) for seed in SEEDS]


async def test_a_drawn_seed_is_that_of_the_first_output(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier()) as (client, _):
        first, second = await client.generate_all(PROMPT, replace(OPTIONS, seed=None, num_outputs=2))
    assert second.seed == output_seed(first.seed, 1)
    assert list(second.token_ids) == plain(babble, PROMPT, 30, second.seed)


async def test_each_ends_where_it_ends(start_fakes: StartFakes) -> None:
    texts = [bytes(plain(babble, PROMPT, 30, seed)).decode() for seed in SEEDS]
    stop = texts[1][10:12]
    async with start_fakes(FakeVerifier()) as (client, _):
        outputs = await client.generate_all(PROMPT, replace(OPTIONS, stop=(stop,)))
    assert [output.text for output in outputs] == [text.partition(stop)[0] for text in texts]
    assert outputs[1].finish_reason == "stop"
    assert "length" in {output.finish_reason for output in outputs}


@pytest.mark.parametrize("shared_block_tokens", [2, 3])
async def test_the_first_begins_alone_where_the_others_can_use_its_prompt(
    start_fakes: StartFakes, shared_block_tokens: int
) -> None:
    verifier = FakeVerifier(shared_block_tokens=shared_block_tokens)
    async with start_fakes(verifier) as (client, _):
        await client.generate_all(PROMPT, OPTIONS)
    assert verifier.generated_at_opening[0] == 0
    assert all(generated > 0 for generated in verifier.generated_at_opening[1:])


@pytest.mark.parametrize("shared_block_tokens", [0, 4, 64])
async def test_all_begin_at_once_where_there_is_nothing_to_share(
    start_fakes: StartFakes, shared_block_tokens: int
) -> None:
    verifier = FakeVerifier(shared_block_tokens=shared_block_tokens, pass_s=60)
    async with start_fakes(verifier) as (client, _):
        stream = client.stream(PROMPT, OPTIONS)
        chunks = asyncio.create_task(anext(aiter(stream)))
        # Before the first pass is over.
        await eventually(lambda: len(verifier.opened) == 3)
        chunks.cancel()


@pytest.mark.parametrize("shared_block_tokens", [0, 2], ids=["all at once", "the first first"])
async def test_one_that_fails_fails_the_request_with_its_status(
    start_fakes: StartFakes, shared_block_tokens: int
) -> None:
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    verifier = FakeVerifier(
        fails_with=code.value[0], fails_seed=SEEDS[1], shared_block_tokens=shared_block_tokens, pass_s=0.02
    )
    async with start_fakes(verifier, FakeDrafter()) as (client, orchestrator):
        with pytest.raises(RequestFailedError) as caught:
            await client.generate_all(PROMPT, replace(OPTIONS, max_tokens=300))
        assert caught.value.code == code
        await nothing_left(orchestrator, verifier)


async def test_cancelling_ends_all(start_fakes: StartFakes) -> None:
    verifier, drafter = FakeVerifier(pass_s=0.01), FakeDrafter()
    async with start_fakes(verifier, drafter) as (client, orchestrator):
        stream = client.stream(PROMPT, replace(OPTIONS, max_tokens=300))
        chunks = aiter(stream)
        await anext(chunks)
        await eventually(lambda: len(verifier.active) == 3)
        stream.cancel()
        await nothing_left(orchestrator, verifier, drafter)
        assert verifier.num_closed == 3


@pytest.mark.parametrize("shared_block_tokens", [0, 2], ids=["all at once", "the first first"])
async def test_the_deadline_ends_all(start_fakes: StartFakes, shared_block_tokens: int) -> None:
    verifier = FakeVerifier(pass_s=0.05, shared_block_tokens=shared_block_tokens)
    async with start_fakes(verifier, default_timeout_s=0.4) as (client, orchestrator):
        with pytest.raises(RequestFailedError) as caught:
            await client.generate_all(PROMPT, replace(OPTIONS, max_tokens=300), None)  # type: ignore[arg-type]
        assert caught.value.code == grpc.StatusCode.DEADLINE_EXCEEDED
        await nothing_left(orchestrator, verifier)
    assert len(verifier.opened) == 3


async def test_every_output_counts_as_a_request(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(pass_s=0.02), max_requests=4, max_queued=0) as (client, orchestrator):
        assert (await client.model_info()).max_outputs == 4
        with pytest.raises(RequestFailedError, match=r"num_outputs: must be in \[1, 4\]"):
            await client.generate_all(PROMPT, replace(OPTIONS, num_outputs=5))
        stream = client.stream(PROMPT, replace(OPTIONS, max_tokens=300))
        chunks = aiter(stream)
        await anext(chunks)
        with pytest.raises(RequestFailedError) as caught:
            await client.generate_all(PROMPT, replace(OPTIONS, num_outputs=2))
        assert caught.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        one = await client.generate(PROMPT, Options(max_tokens=3, seed=7))
        assert list(one.token_ids) == plain(babble, PROMPT, 3, 7)
        stream.cancel()
        await eventually(lambda: orchestrator.service.num_requests == 0)
        assert len(await client.generate_all(PROMPT, replace(OPTIONS, num_outputs=4))) == 4


async def test_the_limit_is_a_setting(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(), max_outputs=2) as (client, _):
        assert (await client.model_info()).max_outputs == 2
        with pytest.raises(RequestFailedError) as caught:
            await client.generate_all(PROMPT, OPTIONS)
        assert caught.value.fields == ("num_outputs",)
        assert len(await client.generate_all(PROMPT, replace(OPTIONS, num_outputs=1))) == 1
