"""The largest requests that are valid, and what a request of that size cannot become."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import FieldDescriptor

from coppice.core.chat import MAX_MESSAGES, MAX_ROLE_BYTES, MAX_TOOLS
from coppice.core.errors import InvalidRequestError
from coppice.core.grammar import MAX_GRAMMAR_BYTES
from coppice.core.sampling import MAX_STOP_STRING_BYTES, MAX_STOP_STRINGS, MAX_TOKEN_LIST
from coppice.v1 import inference_pb2, sampling_pb2, verifier_pb2
from orchestrator.api.validation import (
    MAX_CALLS,
    MAX_PROMPT_BYTES,
    MAX_SOURCE_BYTES,
    MAX_SOURCES,
    max_prompt_bytes,
    max_request_bytes,
    request_sizes,
)
from verifier_svc.service import max_request_bytes as max_verify_bytes
from verifier_svc.service import request_sizes as verify_sizes

CONTEXTS = [16, 2048, 32_768, 1 << 20]
LARGEST_ID = (1 << 32) - 1
Request = inference_pb2.GenerateRequest


def largest(max_context: int) -> Request:
    ids = [LARGEST_ID] * MAX_TOKEN_LIST
    return Request(
        request_id="i" * 128,
        sampling=sampling_pb2.SamplingParams(
            temperature=1.0,
            top_k=LARGEST_ID,
            top_p=1.0,
            min_p=1.0,
            repetition_penalty=1.0,
            presence_penalty=2.0,
            frequency_penalty=2.0,
            logit_bias={LARGEST_ID - index: 1.0 for index in range(MAX_TOKEN_LIST)},
            allowed_token_ids=ids,
            bad_token_ids=ids,
            seed=(1 << 64) - 1,
            grammar=sampling_pb2.Grammar(json_schema="x" * MAX_GRAMMAR_BYTES),
        ),
        stopping=sampling_pb2.StoppingOptions(
            max_tokens=LARGEST_ID,
            min_tokens=LARGEST_ID,
            stop_strings=["s" * MAX_STOP_STRING_BYTES] * MAX_STOP_STRINGS,
            stop_token_ids=ids,
            ignore_eos=True,
        ),
        response=inference_pb2.ResponseOptions(text=True, token_ids=True, top_log_probs=LARGEST_ID, token_bytes=True),
        speculation=inference_pb2.SpeculationPolicy(
            mode=inference_pb2.SpeculationPolicy.MODE_FORCED,
            sources=["d" * MAX_SOURCE_BYTES] * MAX_SOURCES,
            max_nodes=LARGEST_ID,
            acceptance=sampling_pb2.ACCEPTANCE_RULE_TRAVERSAL,
            exactness=sampling_pb2.EXACTNESS_FAST,
            denoising=sampling_pb2.Denoising(steps=LARGEST_ID, block_tokens=LARGEST_ID),
        ),
        resume_token_ids=[LARGEST_ID] * max_context,
        priority=-1,
        cache_salt="c" * 128,
        num_outputs=LARGEST_ID,
    )


def longest_conversation(max_context: int) -> inference_pb2.ChatMessages:
    """As many messages, calls and tools as there may be, and as much text in all; each has some."""
    role, most = "r" * MAX_ROLE_BYTES, max_prompt_bytes(max_context)
    messages = [inference_pb2.ChatMessage(role=role, content="x") for _ in range(MAX_MESSAGES)]
    for message in messages[:MAX_CALLS]:
        message.tool_calls.add(id="i", name="n", arguments="{}")
    tools = ["{}"] * MAX_TOOLS
    messages[-1].content += "x" * (most - MAX_MESSAGES - 4 * MAX_CALLS - 2 * MAX_TOOLS)
    return inference_pb2.ChatMessages(messages=messages, tools=tools)


@pytest.mark.parametrize("max_context", CONTEXTS)
@pytest.mark.parametrize("of", ["text", "ids", "messages"])
def test_the_largest_request_that_is_valid_fits(max_context: int, of: str) -> None:
    request = largest(max_context)
    if of == "text":
        request.prompt = "x" * max_prompt_bytes(max_context)
    elif of == "ids":
        request.token_ids.ids.extend([LARGEST_ID] * max_context)
    else:
        request.messages.CopyFrom(longest_conversation(max_context))
    data = request.SerializeToString()
    assert len(data) <= max_request_bytes(max_context)
    request_sizes(max_context).check(data)


def test_a_message_has_room_for_little_more() -> None:
    request = largest(2048)
    request.messages.CopyFrom(longest_conversation(2048))
    assert max_request_bytes(2048) < 1.05 * request.ByteSize()


def test_every_field_that_may_be_long_has_a_limit() -> None:
    lengthy = {
        field.name
        for field in Request.DESCRIPTOR.fields
        if field.is_repeated or field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE)
    }
    for name in lengthy:
        prefix = Request.DESCRIPTOR.fields_by_name[name].number << 3 | 2
        with pytest.raises(InvalidRequestError) as caught:
            request_sizes(2048).check(bytes((prefix, 0x80, 0x80, 0x80, 0x01)) + bytes(1 << 21))
        assert caught.value.field.partition(".")[0] == name


@pytest.mark.parametrize(
    ("max_context", "num_bytes"), [(2048, 512 * 2048), (32_768, MAX_PROMPT_BYTES), (1 << 20, 32 << 20)]
)
def test_a_prompt_of_text_has_a_limit_by_the_context(max_context: int, num_bytes: int) -> None:
    assert max_prompt_bytes(max_context) == num_bytes


@pytest.mark.parametrize("max_context", CONTEXTS)
def test_what_an_orchestrator_sends_fits_the_verifier(max_context: int) -> None:
    asked = largest(max_context)
    opening = verifier_pb2.OpenSequence(
        prompt_token_ids=asked.resume_token_ids,
        sampling=asked.sampling,
        stopping=asked.stopping,
        cache_salt=asked.cache_salt,
        request_id=asked.request_id,
        traceparent="t" * 55,
    )
    data = verifier_pb2.VerifyRequest(sequence_id=(1 << 64) - 1, open=opening).SerializeToString()
    assert len(data) <= max_verify_bytes(max_context)
    verify_sizes(max_context).check(data)
