"""Log-probabilities from a verifier to a client: one for every token, whatever happens on the way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from coppice.client import Options, RequestFailedError, build_request
from coppice.completion import Completion
from coppice.core.log_probs import TokenLogProbs
from coppice.v1 import verifier_pb2
from tests.conftest import StartFakes
from tests.fakes import FakeDrafter, FakeVerifier, perfect, wrong
from tests.toy_target import script, toy_log_probs

PROMPT = [ord(character) for character in "def "]
OPTIONS = Options(max_tokens=20, seed=7, top_log_probs=2)


def expected(completion: Completion, num_top: int, num_before: int = len(PROMPT)) -> tuple[TokenLogProbs, ...]:
    """What the fake says of a completion's tokens, which begin behind `num_before` others."""
    return tuple(toy_log_probs(num_before + at, token, num_top) for at, token in enumerate(completion.token_ids))


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("drops", [0, 2], ids=["one stream", "a stream that is lost twice"])
async def test_every_token_has_its_own(start_fakes: StartFakes, num_top: int, drops: int) -> None:
    verifier = FakeVerifier(drops=drops)
    async with start_fakes(verifier, FakeDrafter(propose=wrong(after=2)), linger_ms=50) as (client, _):
        completion = await client.generate(PROMPT, replace(OPTIONS, top_log_probs=num_top))
        chunks = [chunk async for chunk in client.stream(PROMPT, replace(OPTIONS, top_log_probs=num_top))]
    assert len(completion.token_ids) == 20
    assert completion.log_probs == expected(completion, num_top)
    assert all(len(chunk.log_probs) == len(chunk.token_ids) for chunk in chunks)
    assert tuple(one for chunk in chunks for one in chunk.log_probs) == completion.log_probs


async def test_those_that_did_not_ask_get_none(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier()
    async with start_fakes(verifier) as (client, _):
        completion = await client.generate(PROMPT, replace(OPTIONS, top_log_probs=None))
    assert completion.log_probs == ()
    assert "log_probs" not in completion.as_json()
    assert not verifier.opened[0].HasField("top_log_probs")


@pytest.mark.parametrize("depth", [0, 3], ids="drafts of {}".format)
async def test_a_stop_string_cuts_them_as_it_cuts_the_token_ids(start_fakes: StartFakes, depth: int) -> None:
    target = script("some text, STOP and more", len(PROMPT))
    drafter = FakeDrafter(propose=perfect(target, depth))
    async with start_fakes(FakeVerifier(target=target), drafter, linger_ms=100) as (client, _):
        completion = await client.generate(PROMPT, Options(stop=("STOP",), top_log_probs=1))
    assert completion.text == "some text, "
    assert bytes(completion.token_ids) == b"some text, STOP"
    assert completion.log_probs == expected(completion, 1)


async def test_a_resumed_call_sends_those_of_its_own_tokens(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier()) as (client, _):
        whole = await client.generate(PROMPT, OPTIONS)
        rest = await client.generate(PROMPT, replace(OPTIONS, resume_token_ids=whole.token_ids[:8]))
    assert rest.log_probs == whole.log_probs[8:]


async def test_they_come_without_the_token_ids_and_the_text(start_fakes: StartFakes) -> None:
    request = build_request(PROMPT, OPTIONS)
    async with start_fakes(FakeVerifier()) as (client, _):
        whole = await client.send(request)
        request.response.text = request.response.token_ids = False
        bare = await client.send(request)
    assert (bare.text, bare.token_ids) == ("", ())
    assert bare.log_probs == whole.log_probs


async def test_json_has_one_object_for_each_token(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier()) as (client, _):
        completion = await client.generate(PROMPT, OPTIONS)
    answer = completion.as_json()["log_probs"]
    assert len(answer) == 20
    one = toy_log_probs(len(PROMPT), completion.token_ids[0], 2)
    assert answer[0] == {
        "log_prob": one.log_prob,
        "top": [
            {"token_id": one.top_token_ids[0], "log_prob": one.top_log_probs[0]},
            {"token_id": one.top_token_ids[1], "log_prob": one.top_log_probs[1]},
        ],
    }


class Forgetful(FakeVerifier):
    """A verifier of another version, which does not know the field."""

    async def Verify(self, requests: Any, context: Any) -> AsyncIterator[verifier_pb2.VerifyResponse]:  # noqa: N802
        async for response in super().Verify(requests, context):
            if response.HasField("outcome"):
                response.outcome.ClearField("log_probs")
            yield response


async def test_a_verifier_that_sends_none_fails_the_request(
    start_fakes: StartFakes, caplog: pytest.LogCaptureFixture
) -> None:
    async with start_fakes(Forgetful()) as (client, _):
        with pytest.raises(RequestFailedError) as caught:
            await client.generate(PROMPT, OPTIONS)
    assert caught.value.code == grpc.StatusCode.INTERNAL
    # Nothing of the client's doing: it has a number, and the log has the reason.
    assert "sent no log-probabilities" in caplog.text
