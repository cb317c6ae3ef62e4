"""The gateway at its socket: answers and streams, refusals, clients that leave or do not read, limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import trustme

from coppice.client import Options
from coppice.core.sampling import output_seed
from coppice.core.tokenizer import fingerprint
from coppice.gateway import endpoint
from coppice.gateway.config import GatewayConfig
from coppice.gateway.upstream import Upstream
from coppice.net.access_token import token_digest
from coppice.settings import ConfigError
from coppice.v1 import inference_pb2
from tests.certificates import directory, issue
from tests.conftest import StartFakes
from tests.fakes import FakeDrafter, FakeVerifier, eventually
from tests.http_client import (
    chunk_of,
    exchanged,
    gateway_to,
    get,
    head_of,
    opened,
    post,
    request_bytes,
)
from tests.toy_target import EOS, TOKENIZER_JSON, babble, plain, script

TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant:"
PROMPT = "def "
IDS = [ord(character) for character in PROMPT]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"model": "toy", "prompt": PROMPT, "max_tokens": 30, "seed": 7}
SAID = [{"role": "user", "content": "hi"}]
TEXT = {"type": "text", "text": "what is this?"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def text_of(count: int, seed: int, prompt: list[int] = IDS) -> str:
    return bytes(plain(babble, prompt, count, seed)).decode()


async def test_a_completion_is_what_grpc_gives(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(), FakeDrafter()) as (client, one), gateway_to(one.address) as address:
        answer = await post(address, COMPLETIONS, {**BODY, "return_token_ids": True, "temperature": 0.5})
        grpc_answer = await client.generate(PROMPT, Options(max_tokens=30, seed=7, temperature=0.5))
    assert answer.status == 200
    [choice] = answer.content["choices"]
    assert choice["text"] == grpc_answer.text == text_of(30, 7)
    assert choice["token_ids"] == list(grpc_answer.token_ids)
    assert choice["finish_reason"] == "length"
    assert choice["coppice"]["seed"] == 7
    assert choice["coppice"]["accepted_tokens"] > 0
    assert answer.content["usage"]["prompt_tokens"] == len(PROMPT)
    assert answer.content["usage"]["completion_tokens"] == 30
    assert answer.content["object"] == "text_completion"
    assert answer.content["system_fingerprint"] == "serving"
    assert float(answer.headers["x-coppice-mean-acceptance-length"]) > 1
    assert answer.content["id"].endswith(answer.headers["x-request-id"])


async def test_defaults_are_openai_s(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier()
    async with start_fakes(verifier) as (_, one), gateway_to(one.address) as address:
        answer = await post(address, COMPLETIONS, {"model": "toy", "prompt": PROMPT})
    assert answer.content["usage"]["completion_tokens"] == 16
    assert verifier.opened[0].sampling.temperature == 1.0


async def test_a_stream_joins_to_the_whole_answer(start_fakes: StartFakes) -> None:
    fields = {**BODY, "n": 2, "stream": True, "stream_options": {"include_usage": True}, "logprobs": 2}
    async with start_fakes(FakeVerifier(), FakeDrafter()) as (_, one), gateway_to(one.address) as address:
        streamed = await post(address, COMPLETIONS, fields)
        whole = await post(address, COMPLETIONS, {**BODY, "n": 2, "logprobs": 2})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *chunks, last = streamed.events
    assert last["choices"] == []
    assert last["usage"] == whole.content["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    for index, choice in enumerate(whole.content["choices"]):
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"] == text_of(30, output_seed(7, index))
        joined: dict[str, list[Any]] = {name: [] for name in choice["logprobs"]}
        for part in parts:
            for name, values in (part["logprobs"] or {}).items():
                joined[name] += values
        assert joined == choice["logprobs"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
        assert parts[-1]["coppice"]["seed"] == output_seed(7, index)


async def test_usage_so_far_comes_with_every_event(start_fakes: StartFakes) -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    fields = {**BODY, "prompt": ["def ", "de"], "n": 2, "stream": True, "stream_options": usage}
    async with start_fakes(FakeVerifier(), FakeDrafter()) as (_, one), gateway_to(one.address) as address:
        *chunks, last = (await post(address, COMPLETIONS, fields)).events
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert 0 < counts[0] < 30
    assert len(set(counts)) > 4
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} <= {2, 4, 6}
    assert chunks[-1]["usage"] == last["usage"]
    assert (last["usage"]["prompt_tokens"], counts[-1]) == (6, 120)
    assert not any("token_ids" in choice for chunk in chunks for choice in chunk["choices"])


async def test_log_probabilities_have_the_tokens_and_their_places(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(target=script("aé!", 4))) as (_, one), gateway_to(one.address) as address:
        answer = await post(address, COMPLETIONS, {**BODY, "logprobs": 1})
        chat = {"model": "toy", "messages": SAID, "max_tokens": 3, "logprobs": True, "top_logprobs": 1, "seed": 1}
        refused = await post(address, CHAT, chat)
    [choice] = answer.content["choices"]
    # EOS has its own.
    assert choice["logprobs"]["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "!", "<eos>"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 3]
    assert choice["text"] == "aé!"
    assert choice["finish_reason"] == "stop"
    # This target has no chat template.
    assert (refused.status, refused.error["param"], refused.error["code"]) == (
        400,
        "messages",
        "unsupported_parameter",
    )


async def test_a_conversation_is_answered(start_fakes: StartFakes) -> None:
    said = [{"role": "developer", "content": "be short"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    prompt = "system: be short\nuser: hi\nassistant:"
    fields = {"model": "toy", "messages": said, "max_completion_tokens": 4, "seed": 3, "logprobs": True}
    async with (
        start_fakes(FakeVerifier(chat_template=TEMPLATE), FakeDrafter()) as (_, one),
        gateway_to(one.address) as address,
    ):
        answer = await post(address, CHAT, fields)
        streamed = await post(address, CHAT, {**fields, "stream": True})
    [choice] = answer.content["choices"]
    expected = text_of(4, 3, list(prompt.encode()))
    assert choice["message"] == {"role": "assistant", "content": expected, "refusal": None}
    assert [one["token"] for one in choice["logprobs"]["content"]] == list(expected)
    assert choice["logprobs"]["content"][0]["bytes"] == [ord(expected[0])]
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed.events]
    assert deltas[0]["role"] == "assistant"
    assert not any("role" in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == expected


async def test_several_prompts_are_several_answers_in_order(start_fakes: StartFakes) -> None:
    fields = {**BODY, "prompt": [IDS, [100, 101]], "n": 2}
    async with start_fakes(FakeVerifier()) as (_, one), gateway_to(one.address) as address:
        answer = await post(address, COMPLETIONS, fields)
        streamed = await post(address, COMPLETIONS, {**fields, "prompt": ["def ", "de"], "stream": True})
    texts = [text_of(30, output_seed(7, index), prompt) for prompt in (IDS, [100, 101]) for index in range(2)]
    assert [choice["text"] for choice in answer.content["choices"]] == texts
    assert answer.content["usage"]["prompt_tokens"] == 6
    joined = ["", "", "", ""]
    for event in streamed.events:
        for choice in event["choices"]:
            joined[choice["index"]] += choice["text"]
    assert joined == texts


async def test_every_parameter_reaches_the_verifier(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier()
    fields = {
        **BODY, "max_tokens": 9, "temperature": 0.5, "top_p": 0.75, "top_k": 5, "min_p": 0.25, "seed": -1,
        "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"97": -2.0},
        "min_tokens": 2, "ignore_eos": True, "stop": ["zzzz"], "stop_token_ids": [0], "allowed_token_ids": [97, 98],
        "cache_salt": "s", "priority": 3, "guided_choice": ["a+b", "c d"],
    }  # fmt: skip
    async with start_fakes(verifier) as (_, one), gateway_to(one.address) as address:
        answer = await post(address, COMPLETIONS, {**fields, "speculation": {"mode": "off", "max_nodes": 3}})
    assert answer.status == 200
    [opened_with] = verifier.opened
    sampling, stopping = opened_with.sampling, opened_with.stopping
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.75, 5, 0.25)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 0.5, -0.5)
    assert dict(sampling.logit_bias) == {97: -2.0}
    assert sampling.seed == 2**64 - 1
    assert list(sampling.allowed_token_ids) == [97, 98]
    assert sampling.grammar.regex == "(a\\+b|c d)"
    assert (stopping.max_tokens, stopping.min_tokens, stopping.ignore_eos) == (9, 2, True)
    assert list(stopping.stop_strings) == ["zzzz"]
    assert list(stopping.stop_token_ids) == [0]
    assert opened_with.priority == 3
    assert answer.content["choices"][0]["coppice"]["draft_tokens"] == 0


REFUSED: list[tuple[str, dict[str, Any], str | None]] = [
    (COMPLETIONS, {"temperature": -1}, "temperature"),
    (COMPLETIONS, {"temperature": "hot"}, "temperature"),
    (COMPLETIONS, {"top_p": 2}, "top_p"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": -5}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": True}, "max_tokens"),
    (COMPLETIONS, {"stop": ["a"] * 17}, "stop"),
    (COMPLETIONS, {"stop": ["a", 1]}, "stop.1"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"n": 0}, "n"),
    (COMPLETIONS, {"n": 1000}, "n"),
    (COMPLETIONS, {"seed": 2**64}, "seed"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 65}, "prompt"),
    (COMPLETIONS, {"prompt": [300]}, "prompt"),
    (COMPLETIONS, {"prompt": ["x", [1]]}, "prompt.1"),
    (COMPLETIONS, {"prompt": "x" * 500}, "prompt"),
    (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"97": 1000}}, "logit_bias"),
    (COMPLETIONS, {"echo": True}, "echo"),
    (COMPLETIONS, {"best_of": 2}, "best_of"),
    (COMPLETIONS, {"no_such_field": 1}, "no_such_field"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETIONS, {"stream": True, "stream_options": {"continuous": True}}, "stream_options.continuous"),
    (COMPLETIONS, {"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    (COMPLETIONS, {"speculation": {"sources": ["none such"]}}, "speculation.sources"),
    (COMPLETIONS, {"speculation": {"mode": "on"}}, "speculation.mode"),
    (COMPLETIONS, {"guided_regex": "a", "guided_json": {}}, "guided_regex"),
    (COMPLETIONS, {"guided_choice": []}, "guided_choice"),
    (COMPLETIONS, {"structured_outputs": {"grammar": "root"}}, "structured_outputs.grammar"),
    (COMPLETIONS, {"response_format": {"type": "json_schema"}}, "response_format"),
    (COMPLETIONS, {"user": "é"}, "user"),
    (COMPLETIONS, {"model": "another"}, "model"),
    (COMPLETIONS, {"model": None}, "model"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [TEXT, IMAGE]}]}, "messages.0.content.1.type"),
    (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": "n" * 129}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages.0.weight"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "tools.0.type"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"functions": []}, "functions"),
    (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"skip_special_tokens": False}, "skip_special_tokens"),
    (CHAT, {"continue_final_message": True}, "continue_final_message"),
    (CHAT, {"modalities": ["audio"]}, "modalities"),
]


async def test_a_refusal_names_the_field(start_fakes: StartFakes) -> None:
    told = []
    async with (
        start_fakes(FakeVerifier(chat_template=TEMPLATE)) as (_, one),
        gateway_to(one.address) as address,
    ):
        for path, fields, param in REFUSED:
            given = {"messages": SAID} if path == CHAT else {"prompt": PROMPT}
            answer = await post(address, path, {"model": "toy", **given, **fields})
            assert answer.status == (404 if fields.get("model") else 400), (fields, answer.body)
            told.append((fields, param, answer.error["param"]))
            assert answer.error["type"] == "invalid_request_error"
            assert str(answer.error["param"]).split(".")[0] in answer.error["message"]
    wrong = [row for row in told if not str(row[2]).startswith(str(row[1]))]
    assert not wrong


async def test_what_asks_for_nothing_is_no_refusal(start_fakes: StartFakes) -> None:
    neutral: dict[str, Any] = {
        "store": False,
        "modalities": ["text"],
        "service_tier": "auto",
        "stop": None,
        "user": None,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
        "use_beam_search": False,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "echo": False,
    }
    async with start_fakes(FakeVerifier(chat_template=TEMPLATE)) as (_, one), gateway_to(one.address) as address:
        sent_back = {"role": "assistant", "content": "x", "refusal": None, "audio": None, "annotations": None}
        fields = {"model": "toy", "messages": [*SAID, sent_back], "max_tokens": 2, **neutral}
        answer = await post(address, CHAT, fields)
    assert answer.status == 200, answer.body


async def test_bodies_that_are_no_request_are_refused(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier()) as (_, one), gateway_to(one.address, max_body_mib=1) as address:

        async def status(body: bytes, **headers: str) -> int:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return (await exchanged(address, request_bytes("POST", COMPLETIONS, body, named))).status

        valid = json.dumps(BODY).encode()
        assert await status(valid) == 200
        # A page elsewhere can have a browser send these types without asking.
        assert await status(valid, content_type="text/plain") == 415
        assert await status(valid, content_encoding="gzip") == 415
        assert await status(valid, content_encoding="identity") == 200
        assert await status(b"{") == 400
        assert await status(b"[1]") == 400
        assert await status(b"\xff") == 400
        assert await status(b"[" * 100_000) == 400
        assert await status(b'{"model": "toy", "prompt": "\\ud800"}') == 400
        assert await status(b'{"model": "toy", "prompt": "x", "temperature": NaN}') == 400
        assert await status(b" " * 2**20 + valid) == 413
        assert await status(valid, x_request_timeout="soon") == 400
        assert await status(valid, x_request_id="x" * 129) == 400
        assert (await get(address, "/v1/nothing")).error["code"] == "unknown_url"
        assert (await get(address, COMPLETIONS)).status == 405
        assert await status(valid) == 200


async def test_a_body_without_a_length_is_bounded_too(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier()) as (_, one), gateway_to(one.address, max_body_mib=1) as address:
        reader, writer = await opened(address)
        head = {"transfer-encoding": "chunked"}
        request = request_bytes("POST", COMPLETIONS, headers=head).replace(b"content-length: 0\r\n", b"")
        writer.write(request + (b"10000\r\n" + b" " * 0x10000 + b"\r\n") * 17)
        status, _ = await head_of(reader)
        writer.close()
    assert status == 413


TOOL_TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}" + (
    "{% for one in messages %}{{ one.role }}:{{ one.content }}"
    "{% for call in one.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ one.tool_call_id }}\n{% endfor %}assistant:"
)
PARAMETERS = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "number"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("add", "sub")
]


async def test_tools_are_rendered_and_their_calls_are_found(start_fakes: StartFakes) -> None:
    text = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
    call = {"id": "c7", "type": "function", "function": {"name": "add", "arguments": '{"x": 0}'}}
    said = [
        *SAID,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "0", "tool_call_id": "c7"},
    ]
    prompt = 'add;sub;user:hi\nassistant:add{"x": 0}\ntool:0c7\nassistant:'
    verifier = FakeVerifier(target=script(text, len(prompt)), chat_template=TOOL_TEMPLATE)
    fields = {"model": "toy", "messages": said, "tools": TOOLS, "seed": 1}
    async with start_fakes(verifier, FakeDrafter()) as (_, one), gateway_to(one.address) as address:
        answer = await post(address, CHAT, fields)
        streamed = await post(address, CHAT, {**fields, "stream": True})
        without = await post(address, CHAT, {**fields, "tool_choice": "none", "max_tokens": 3})
    assert bytes(verifier.opened[0].prompt_token_ids).decode() == prompt
    assert not bytes(verifier.opened[2].prompt_token_ids).startswith(b"add")
    [choice] = answer.content["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    [found] = choice["message"]["tool_calls"]
    assert (found["type"], found["function"]) == ("function", {"name": "add", "arguments": '{"x": 1}'})
    parts = [part for event in streamed.events for part in event["choices"][0]["delta"].get("tool_calls", ())]
    assert [(part["index"], part["function"]) for part in parts] == [(0, found["function"])]
    assert "tool_calls" not in without.content["choices"][0]["message"]


@pytest.mark.parametrize(
    ("mark", "text", "is_mistral"),
    [
        ("[TOOL_CALLS]", b'Let me see.\xff [{"name": "add", "arguments": {"x": 1}}]', True),
        ("<|python_tag|>", b'{"name": "add", "parameters": {"x": 1}}', False),
    ],
)
async def test_calls_are_found_in_the_format_of_the_template(
    start_fakes: StartFakes, mark: str, text: bytes, is_mistral: bool
) -> None:
    # The byte 0xff, which no text has, becomes the special token of Mistral's format.
    content = json.loads(TOKENIZER_JSON)
    content["model"]["vocab"] = {name: one for name, one in content["model"]["vocab"].items() if one != 0xFF}
    added = {**content["added_tokens"][0], "id": 0xFF, "content": "[TOOL_CALLS]"}
    content["added_tokens"].insert(0, added)
    tokenizer_json = json.dumps(content).encode()
    prompt = "add;sub;user:hi\nassistant:"

    def target(tokens: Sequence[int], seed: int) -> int:
        at = len(tokens) - len(prompt)
        return text[at] if at < len(text) else EOS

    verifier = FakeVerifier(
        target=target,
        chat_template=TOOL_TEMPLATE + f"{{# {mark} #}}",
        tokenizer_json=tokenizer_json,
        tokenizer_fingerprint=fingerprint(tokenizer_json),
    )
    fields = {"model": "toy", "messages": SAID, "tools": TOOLS}
    async with start_fakes(verifier) as (_, one), gateway_to(one.address) as address:
        answer = await post(address, CHAT, fields)
        without = await post(address, CHAT, {**fields, "tool_choice": "none", "max_tokens": 3})
    [choice] = answer.content["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == ("Let me see." if is_mistral else None)
    [found] = choice["message"]["tool_calls"]
    assert found["function"] == {"name": "add", "arguments": '{"x": 1}'}
    assert (len(found["id"]) == 9) is is_mistral
    assert "tool_calls" not in without.content["choices"][0]["message"]


@pytest.mark.parametrize(
    ("opened", "text"), [("", "<think>\nHm.\n</think>\n\nYes."), ("<think>\n", "Hm.\n</think>Yes.")]
)
async def test_reasoning_is_apart_from_content(start_fakes: StartFakes, opened: str, text: str) -> None:
    prompt = "user: hi\nassistant:" + opened
    verifier = FakeVerifier(
        target=script(text, len(prompt)),
        # Jinja drops a template's last line break.
        chat_template=TEMPLATE + "{# </think> #}" + opened + ("\n" if opened else ""),
    )
    fields = {"model": "toy", "messages": SAID}
    async with start_fakes(verifier) as (_, one), gateway_to(one.address) as address:
        answer = await post(address, CHAT, fields)
        streamed = await post(address, CHAT, {**fields, "stream": True})
        held = await post(address, CHAT, {**fields, "guided_regex": "a*"})
        again = await post(
            address, CHAT, {**fields, "messages": [*SAID, answer.content["choices"][0]["message"]], "max_tokens": 1}
        )
    message = answer.content["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    deltas = [event["choices"][0]["delta"] for event in streamed.events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    # The fake verifier keeps no grammar.
    assert held.content["choices"][0]["message"]["content"] == text
    assert again.status == 200


async def test_a_call_that_is_asked_for_is_held_to_its_schema(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier(chat_template=TOOL_TEMPLATE)
    fields = {"model": "toy", "messages": SAID, "tools": TOOLS, "max_tokens": 5, "seed": 1}
    async with start_fakes(verifier) as (_, one), gateway_to(one.address) as address:
        chosen = {"type": "function", "function": {"name": "sub"}}
        named = await post(address, CHAT, {**fields, "tool_choice": chosen, "parallel_tool_calls": False})
        await post(address, CHAT, {**fields, "tool_choice": "required"})
        refused = [
            (await post(address, CHAT, {**fields, **more})).error["param"]
            for more in (
                {"tool_choice": "required", "response_format": {"type": "json_object"}},
                {"tool_choice": {"type": "function", "function": {"name": "mul"}}},
                {"tools": None, "tool_choice": "required"},
                {"tools": [TOOLS[0], TOOLS[0]]},
                {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
                {"parallel_tool_calls": False},
                {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
                {
                    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$defs": 1}}}],
                    "tool_choice": "required",
                },
            )
        ]
    first, second = [json.loads(one.sampling.grammar.json_schema) for one in verifier.opened]
    assert first == TOOLS[1]["function"]["parameters"]
    assert second["$defs"] == {"n": {"type": "number"}}
    assert [call["properties"]["name"] for call in second["anyOf"]] == [{"const": "add"}, {"const": "sub"}]
    # The fake verifier keeps no grammar: all of its text counts as arguments.
    [found] = named.content["choices"][0]["message"]["tool_calls"]
    assert found["function"]["name"] == "sub"
    assert len(found["function"]["arguments"]) == 5
    assert refused == [
        "response_format",
        "tool_choice",
        "tool_choice",
        "tools",
        "tools",
        "parallel_tool_calls",
        "tools.0.function.parameters",
        "tools",
    ]


async def test_a_template_without_a_place_for_tools_has_them_refused(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(chat_template=TEMPLATE)) as (_, one), gateway_to(one.address) as address:
        answer = await post(address, CHAT, {"model": "toy", "messages": SAID, "tools": TOOLS})
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "tools", "unsupported_parameter")


async def test_text_becomes_tokens_and_text_again(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(chat_template=TOOL_TEMPLATE)) as (_, one), gateway_to(one.address) as address:
        plain_text = await post(address, "/tokenize", {"model": "toy", "prompt": "aé", "return_token_strs": True})
        chat = await post(address, "/tokenize", {"messages": SAID, "tools": TOOLS})
        back = await post(address, "/detokenize", {"tokens": chat.content["tokens"]})
        refused = [
            (await post(address, path, fields)).error["param"]
            for path, fields in (
                ("/tokenize", {"prompt": "a", "messages": SAID}),
                ("/tokenize", {"prompt": "a", "tools": TOOLS}),
                ("/tokenize", {"prompt": "a", "model": "another"}),
                ("/tokenize", {"prompt": ""}),
                ("/detokenize", {"tokens": [257]}),
                ("/detokenize", {"tokens": "a"}),
            )
        ]
    assert plain_text.content == {
        "count": 3,
        "max_model_len": 400,
        "tokens": [97, 195, 169],
        "token_strs": ["a", "bytes:\\xc3", "bytes:\\xa9"],
    }
    assert back.content == {"prompt": "add;sub;user:hi\nassistant:"}
    assert refused == ["prompt", "tools", "model", "prompt", "tokens", "tokens"]


async def test_metrics_are_served_where_they_are_set(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier()) as (_, one):
        async with gateway_to(one.address) as address:
            assert (await get(address, "/metrics")).status == 404
        async with gateway_to(one.address, metrics="on") as address:
            await post(address, COMPLETIONS, BODY)
            await post(address, COMPLETIONS, {})
            page = await get(address, "/metrics")
    lines = page.body.decode().splitlines()
    assert f'coppice_gateway_requests_total{{endpoint="{COMPLETIONS}",status="200"}} 1.0' in lines
    assert f'coppice_gateway_requests_total{{endpoint="{COMPLETIONS}",status="400"}} 1.0' in lines
    assert "coppice_gateway_running_requests 0.0" in lines


async def test_models_health_and_readiness(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(model="org/Some-Model")) as (_, one):
        async with gateway_to(one.address) as address:
            listed, health = await get(address, "/v1/models"), await get(address, "/health")
            assert (await get(address, "/ready")).status == 200
            alone, other = await get(address, "/v1/models/org/Some-Model"), await get(address, "/v1/models/x")
        async with gateway_to(one.address, served_model_name="mine") as address:
            named = await post(address, COMPLETIONS, {**BODY, "model": "mine"})
    assert [card["id"] for card in listed.content["data"]] == [alone.content["id"]] == ["Some-Model"]
    assert listed.content["data"][0]["max_model_len"] == 400
    assert (health.status, other.status, named.content["model"]) == (200, 404, "mine")


async def test_without_an_orchestrator_it_is_healthy_and_not_ready() -> None:
    async with gateway_to("127.0.0.1:1") as address:
        assert (await get(address, "/health")).status == 200
        assert (await get(address, "/ready")).status == 503
        answer = await post(address, COMPLETIONS, BODY)
    assert answer.status == 503
    assert answer.error["message"] == "the model is not available now"


@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_that_leaves_cancels_its_call_within_100_ms(start_fakes: StartFakes, streams: bool) -> None:
    verifier, took_s = FakeVerifier(pass_s=0.02), []
    async with start_fakes(verifier) as (_, one), gateway_to(one.address) as address:
        # The quickest of a few: other processes have the machine, too.
        for _ in range(5):
            reader, writer = await opened(address)
            body = {**BODY, "max_tokens": 390, "ignore_eos": True, "stream": streams}
            writer.write(request_bytes("POST", COMPLETIONS, json.dumps(body).encode()))
            if streams:
                await head_of(reader)
            num_generated = verifier.num_generated
            await eventually(lambda least=num_generated + 2: verifier.num_generated > least)
            assert one.service.num_requests == 1
            writer.transport.abort()
            left_s = time.monotonic()
            await eventually(lambda: one.service.num_requests == 0)
            took_s.append(time.monotonic() - left_s)
            await eventually(lambda: not verifier.active)
    assert min(took_s) < 0.1


@pytest.mark.parametrize("streams", [True, False])
async def test_clients_that_leave_with_their_request_cost_no_generation(
    start_fakes: StartFakes, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = Mock(side_effect=Upstream.generate)
    monkeypatch.setattr(Upstream, "generate", lambda *arguments: generate(*arguments))
    async with start_fakes(FakeVerifier(pass_s=0.02)) as (_, one), gateway_to(one.address) as address:
        # What is known of the model afterwards.
        await post(address, COMPLETIONS, BODY)
        request = request_bytes("POST", COMPLETIONS, json.dumps({**BODY, "stream": streams}).encode())
        host, _, port = address.rpartition(":")
        for _ in range(10):
            with socket.create_connection((host, int(port))) as client:
                # Once it is accepted, request and end in one piece: the event loop sees both at once.
                await asyncio.sleep(0.02)
                client.sendall(request)
            await asyncio.sleep(0.02)
        # The first of them is not expected.
        assert generate.call_count == 2


async def test_a_deadline_is_an_answer(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(pass_s=0.05)) as (_, one), gateway_to(one.address) as address:
        whole = await post(address, COMPLETIONS, {**BODY, "max_tokens": 390}, x_request_timeout="0.3")
        stream = await post(address, COMPLETIONS, {**BODY, "max_tokens": 390, "stream": True}, x_request_timeout="0.3")
    assert (whole.status, whole.error["code"]) == (504, "timeout")
    # Its head was sent long before.
    assert stream.status == 200
    assert stream.events[-1]["error"]["code"] == "timeout"


async def test_an_overload_says_when_to_come_back(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier(pass_s=0.02)
    limits = {"max_requests": 1, "max_queued": 0}
    async with start_fakes(verifier, **limits) as (_, one), gateway_to(one.address) as address:
        first = asyncio.create_task(post(address, COMPLETIONS, {**BODY, "max_tokens": 100}))
        await eventually(lambda: one.service.num_requests == 1)
        answer = await post(address, COMPLETIONS, BODY)
        assert (answer.status, answer.error["type"]) == (429, "rate_limit_error")
        assert int(answer.headers["retry-after"]) >= 1
        assert (await first).status == 200


async def test_silence_is_filled_with_comments(start_fakes: StartFakes) -> None:
    gate = asyncio.Event()
    verifier = FakeVerifier(gates={7: gate})
    async with start_fakes(verifier) as (_, one), gateway_to(one.address, keep_alive_s=0.05) as address:
        reader, writer = await opened(address)
        body = {**BODY, "stream": True, "max_tokens": 3}
        writer.write(request_bytes("POST", COMPLETIONS, json.dumps(body).encode()))
        assert (await head_of(reader))[0] == 200
        assert [await chunk_of(reader) for _ in range(3)] == [b": keep-alive\n\n"] * 3
        gate.set()
        rest = []
        while part := await chunk_of(reader):
            rest.append(part)
        writer.close()
    assert rest[0].startswith(b"data: {")
    assert rest[-1] == b"data: [DONE]\n\n"


async def test_a_client_that_does_not_read_loses_its_connection(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier(max_context_tokens=200_000, pass_s=0)
    async with (
        start_fakes(verifier, unread_s=0) as (_, one),
        gateway_to(one.address, unread_s=0.2) as address,
    ):
        reader, writer = await opened(address, receive_buffer=4096)
        # Large answers for each token, which fill the buffers on the way soon.
        body = {**BODY, "max_tokens": 100_000, "stream": True, "logprobs": 20, "ignore_eos": True}
        writer.write(request_bytes("POST", COMPLETIONS, json.dumps(body).encode()))
        await head_of(reader)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await eventually(lambda: one.service.num_requests == 0, timeout_s=60)
        writer.transport.abort()


async def test_requests_that_do_not_arrive_and_heads_without_end_lose_their_connection(
    start_fakes: StartFakes,
) -> None:
    async with start_fakes(FakeVerifier()) as (_, one), gateway_to(one.address, receive_s=0.2) as address:
        for begun in (b"", b"POST /v1/completions HTTP/1.1\r\ncontent-length: 9\r\n", b"GET /health HTTP/1.1\r\n"):
            reader, writer = await opened(address)
            writer.write(begun)
            async with asyncio.timeout(5):
                assert await reader.read() == b""
            writer.close()
    async with start_fakes(FakeVerifier()) as (_, one), gateway_to(one.address) as address:
        for endless in (b"GET /health HTTP/1.1\r\nx: " + b"y" * 300_000, b"GET /" + b"y" * 300_000):
            reader, writer = await opened(address)
            writer.write(endless)
            async with asyncio.timeout(5):
                status, headers = await head_of(reader)
                body = await reader.readexactly(int(headers["content-length"]))
                assert (status, json.loads(body)["error"]["code"]) == (431, "request_too_large")
            writer.close()
        assert (await get(address, "/health")).status == 200


async def test_a_token_says_who_calls(start_fakes: StartFakes, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(json.dumps({"tenant": "alice", "sha256": [token_digest("alice!")], "max_tokens": 20}))
    async with (
        start_fakes(FakeVerifier(), tokens_file=str(tokens)) as (_, one),
        gateway_to(one.address) as address,
    ):
        fields = {**BODY, "max_tokens": 5, "user": "somebody"}
        # Also once the gateway knows the model's name.
        assert (await post(address, COMPLETIONS, fields, authorization="Bearer alice!")).status == 200
        for headers in ({}, {"authorization": "Bearer bob!"}, {"authorization": "Basic alice!"}):
            answer = await post(address, COMPLETIONS, fields, **headers)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "bearer"
            assert (await post(address, COMPLETIONS, {**fields, "model": "x"}, **headers)).status == 401
            answer = await get(address, "/v1/models", **headers)
            assert (answer.status, answer.headers["www-authenticate"]) == (401, "bearer")
        limited = await post(address, COMPLETIONS, {**fields, "max_tokens": 21}, authorization="Bearer alice!")
        assert (limited.status, limited.error["param"]) == (400, "max_tokens")
        # Probes have none.
        assert (await get(address, "/ready")).status == 200


async def test_the_user_of_a_request_without_a_token_is_its_tenant(
    start_fakes: StartFakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants = []
    async with start_fakes(FakeVerifier()) as (_, one), gateway_to(one.address) as address:
        enter = one.service.admission.enter
        monkeypatch.setattr(
            one.service.admission, "enter", lambda claim, *rest: tenants.append(claim.tenant) or enter(claim, *rest)
        )
        assert (await post(address, COMPLETIONS, {**BODY, "user": "alice"})).status == 200
        assert (await post(address, COMPLETIONS, {**BODY, "user": "alice"}, authorization="Bearer x")).status == 200
    assert tenants == ["alice", ""]


async def test_pages_of_other_origins_are_allowed_only_where_they_are_set(start_fakes: StartFakes) -> None:
    preflight = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    request = request_bytes("OPTIONS", COMPLETIONS, headers=preflight)
    async with start_fakes(FakeVerifier()) as (_, one):
        async with gateway_to(one.address) as address:
            closed = await exchanged(address, request)
        async with gateway_to(one.address, allowed_origins="https://chat.example") as address:
            allowed = await exchanged(address, request)
            other = await exchanged(address, request.replace(b"chat.example", b"evil.example"))
    assert "access-control-allow-origin" not in closed.headers
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
    assert "access-control-allow-origin" not in other.headers


async def test_both_sides_speak_tls_with_the_current_certificate(start_fakes: StartFakes, tmp_path: Path) -> None:
    authority = trustme.CA()
    files = directory(tmp_path / "tls", authority)
    served = {"tls_cert": files.cert, "tls_key": files.key}
    context, shown = ssl.create_default_context(), set()
    authority.configure_trust(context)
    async with (
        start_fakes(FakeVerifier(), **served) as (_, one),
        gateway_to(one.address, **served, orchestrator_tls_ca=files.ca) as address,
    ):
        host, _, port = address.rpartition(":")
        for _ in range(2):
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
            shown.add(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
            writer.write(request_bytes("POST", COMPLETIONS, json.dumps(BODY).encode()))
            status, headers = await head_of(reader)
            body = json.loads(await reader.readexactly(int(headers["content-length"])))
            writer.close()
            assert status == 200
            assert body["choices"][0]["text"] == text_of(30, 7)
            files.swap(issue(authority), authority)
    assert len(shown) == 2


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="ORCHESTRATOR_TLS_CA must be set"):
        GatewayConfig(orchestrator_address="127.0.0.1:1", orchestrator_tls_name="x")


async def test_more_requests_than_may_wait_for_an_answer_end_the_connection(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier()) as (_, one), gateway_to(one.address) as address:
        few = await answers_to(address, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 8)
        many = await answers_to(address, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 2000)
    assert few == [200] * 8
    assert len(many) < 40
    assert many[-1] == 400


async def answers_to(address: str, requests: bytes) -> list[int]:
    """Statuses of what is answered until nothing comes for a while."""
    reader, writer = await opened(address)
    writer.write(requests)
    received = b""
    with contextlib.suppress(TimeoutError):
        while part := await asyncio.wait_for(reader.read(1 << 16), 1.0):
            received += part
    writer.close()
    return [int(rest[:3]) for rest in received.split(b"HTTP/1.1 ")[1:]]


async def test_a_body_that_comes_slowly_gives_its_room_back(
    start_fakes: StartFakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "BODY_S", 0.2)
    async with start_fakes(FakeVerifier()) as (_, one), gateway_to(one.address) as address:
        reader, writer = await opened(address)
        head = {"content-length": str(2**20)}
        writer.write(request_bytes("POST", COMPLETIONS, headers=head).replace(b"content-length: 0\r\n", b"") + b"{")
        status, _ = await head_of(reader)
        writer.close()
    assert status == 408


async def test_clients_of_other_addresses_have_other_connections_to_the_orchestrator(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier()) as (_, one):
        upstream = Upstream(one.address)
        request = inference_pb2.GenerateRequest(prompt="def ")
        request.stopping.max_tokens = 2
        for client in ("127.0.0.1", "127.0.0.2", "127.0.0.1", "::1", ""):
            async for _ in upstream.generate(b"", request.SerializeToString(), (), 5.0, client, ""):
                pass
        assert len(upstream._channels) == 3
        await upstream.close()
