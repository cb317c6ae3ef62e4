"""Messages that are large, or would become so: refused for a bounded amount of memory, and others are served."""

from __future__ import annotations

import gzip

import grpc
import pytest

from coppice.client import Options, RequestFailedError
from coppice.v1 import drafter_pb2, inference_pb2, sampling_pb2
from drafter_svc.service import MAX_REQUEST_BYTES, REQUEST_SIZES
from orchestrator.api.validation import max_request_bytes
from tests.conftest import StartFakes
from tests.fakes import FakeVerifier
from tests.toy_target import CONTEXT, babble, plain

GENERATE = "/coppice.v1.InferenceService/Generate"
PROMPT = [ord(character) for character in "def "]
Request = inference_pb2.GenerateRequest
LARGE = 512 * 1024
# Large contexts, so that messages of this size are taken.
MAX_CONTEXT = 64 * CONTEXT
MIB = 1024 * 1024
UNPACKED = b"\x40\x01" * (LARGE // 2)

TOO_MUCH: dict[str, bytes] = {
    "stopping.stop_strings": Request(
        prompt="x", stopping=sampling_pb2.StoppingOptions(stop_strings=["x"] * (LARGE // 3))
    ).SerializeToString(),
    "speculation.sources": Request(
        prompt="x", speculation=inference_pb2.SpeculationPolicy(sources=["x"] * (LARGE // 3))
    ).SerializeToString(),
    "sampling.logit_bias": Request(
        prompt="x", sampling=sampling_pb2.SamplingParams(logit_bias=dict.fromkeys(range(LARGE // 13), 1.0))
    ).SerializeToString(),
    "request": Request(prompt="x").SerializeToString() + UNPACKED,
}


async def refused(
    address: str, data: bytes, compression: grpc.Compression = grpc.Compression.NoCompression
) -> grpc.aio.AioRpcError:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        call = channel.unary_stream(GENERATE, request_serializer=None, response_deserializer=None)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call(data, timeout=20, compression=compression):
                pass
    return caught.value


@pytest.mark.parametrize("field", TOO_MUCH)
async def test_a_list_that_is_too_long_is_refused_unread_by_name(start_fakes: StartFakes, field: str) -> None:
    async with start_fakes(FakeVerifier(max_context_tokens=MAX_CONTEXT)) as (client, orchestrator):
        error = RequestFailedError(await refused(orchestrator.address, TOO_MUCH[field]))
        assert error.code == grpc.StatusCode.INVALID_ARGUMENT
        assert error.fields == (field,)
        # A parser would have taken it.
        Request.FromString(TOO_MUCH[field])
        completion = await client.generate(PROMPT, Options(max_tokens=5, seed=7))
        assert list(completion.token_ids) == plain(babble, PROMPT, 5, 7)
        assert orchestrator.service.tally.num_requests == 1


async def test_a_message_that_no_request_needs_is_refused_by_its_length(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier()) as (_, orchestrator):
        error = await refused(orchestrator.address, bytes(max_request_bytes(CONTEXT) + 1))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_small_message_that_is_large_when_it_is_inflated_is_refused(start_fakes: StartFakes) -> None:
    """gRPC inflates no more of it than a message may have."""
    data = Request(prompt="x" * 32 * MIB).SerializeToString()
    async with start_fakes(FakeVerifier()) as (_, orchestrator):
        assert len(gzip.compress(data)) < max_request_bytes(CONTEXT)
        error = await refused(orchestrator.address, data, grpc.Compression.Gzip)
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in str(error.details())


async def test_the_longest_prompt_is_taken(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(max_context_tokens=MAX_CONTEXT)) as (client, _):
        longest = [ord("x")] * (MAX_CONTEXT - 2)
        completion = await client.generate(longest, Options(max_tokens=2))
        assert completion.usage.prompt_tokens == len(longest)


def test_back_ends_bound_what_an_orchestrator_may_send() -> None:
    """Features of a round, and a prompt of a million tokens, are within it."""
    features = drafter_pb2.DraftOutcome(base_length=1, token_ids=[1] * 256, features=bytes(256 * 2 * 8192))
    opening = drafter_pb2.OpenDraft(prompt_token_ids=[2**32 - 1] * 10**6)
    for request in (drafter_pb2.DraftRequest(outcome=features), drafter_pb2.DraftRequest(open=opening)):
        data = request.SerializeToString()
        assert len(data) < MAX_REQUEST_BYTES
        REQUEST_SIZES.check(data)
