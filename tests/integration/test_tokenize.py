"""Tokenize and Detokenize: the tokens that Generate makes of the same input, and their text."""

from __future__ import annotations

import json

import grpc
import pytest

from coppice.client import Client
from coppice.net import rpc
from coppice.v1 import inference_pb2, inference_pb2_grpc
from tests.conftest import StartFakes
from tests.fakes import FakeVerifier
from tests.toy_target import EOS

TEMPLATE = "{% if tools %}[{{ tools | map(attribute='function.name') | join(' ') }}]{% endif %}" + (
    "{% for one in messages %}{{ one.role }}:{{ one.content }}"
    "{% for call in one.tool_calls %}{{ call.function.name }}({{ call.function.arguments.x }}){% endfor %}"
    "{{ one.tool_call_id }};{% endfor %}assistant:"
)
TOOL = json.dumps({"type": "function", "function": {"name": "f", "parameters": {}}})


def conversation() -> inference_pb2.ChatMessages:
    said = inference_pb2.ChatMessages(tools=[TOOL])
    said.messages.add(role="user", content="é")
    said.messages.add(role="assistant").tool_calls.add(id="c0", name="f", arguments='{"x": 7}')
    said.messages.add(role="tool", content="14", tool_call_id="c0", name="f")
    return said


async def test_they_are_the_tokens_of_generate(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier(chat_template=TEMPLATE)
    async with start_fakes(verifier) as (client, one), rpc.open_channel(one.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for given in ({"prompt": "dé"}, {"messages": conversation()}):
            request = inference_pb2.TokenizeRequest(**given, token_bytes=True)
            answer = await stub.Tokenize(request)
            await client.send(inference_pb2.GenerateRequest(**given, stopping={"max_tokens": 1}))
            assert list(answer.token_ids) == list(verifier.opened[-1].prompt_token_ids)
            text = (await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=answer.token_ids))).text
            assert b"".join(answer.tokens).decode() == text
        assert text == "[f]user:é;assistant:f(7);tool:14c0;assistant:"
        special = await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[97, EOS]))
        assert special.text == "a<eos>"


WRONG = [
    (inference_pb2.TokenizeRequest(), "prompt"),
    (inference_pb2.TokenizeRequest(prompt=""), "prompt"),
    (inference_pb2.TokenizeRequest(prompt="x" * 400 * 512 + "x"), "prompt"),
    (inference_pb2.TokenizeRequest(messages=inference_pb2.ChatMessages(tools=[TOOL])), "messages"),
    (
        inference_pb2.TokenizeRequest(
            messages=inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="user")], tools=["[]"])
        ),
        "messages.tools",
    ),
    (
        inference_pb2.TokenizeRequest(
            messages=inference_pb2.ChatMessages(
                messages=[
                    inference_pb2.ChatMessage(role="a", tool_calls=[inference_pb2.ToolCall(name="f", arguments="7")])
                ]
            )
        ),
        "messages",
    ),
    (inference_pb2.DetokenizeRequest(token_ids=[1] * 401), "token_ids"),
    (inference_pb2.DetokenizeRequest(token_ids=[257]), "token_ids"),
]


@pytest.mark.parametrize(("request_", "field"), WRONG)
async def test_what_is_wrong_is_refused(
    start_fakes: StartFakes, request_: inference_pb2.TokenizeRequest | inference_pb2.DetokenizeRequest, field: str
) -> None:
    async with (
        start_fakes(FakeVerifier(chat_template=TEMPLATE)) as (_, one),
        rpc.open_channel(one.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        method = stub.Tokenize if isinstance(request_, inference_pb2.TokenizeRequest) else stub.Detokenize
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(request_)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(f"{field}:")


async def test_tools_need_a_place_in_the_template(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(chat_template="{{ messages[0].content }}")) as (client, one):
        assert isinstance(client, Client)
        async with rpc.open_channel(one.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Tokenize(inference_pb2.TokenizeRequest(messages=conversation()))
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert caught.value.details() == "messages.tools: the target's chat template has no place for tools"
