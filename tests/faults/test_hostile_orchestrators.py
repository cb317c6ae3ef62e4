"""A gateway whose orchestrator gives broken answers: its clients get an error, and the next good answer is good."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status

from coppice.client import RequestFailedError
from coppice.v1 import inference_pb2
from tests.faults.fuzz import DEADLINE_S
from tests.faults.hostile_orchestrator import MODEL, TEXT, HostileOrchestrator, orchestrating, output
from tests.http_client import Answered, gateway_to, get, post

COMPLETIONS, CHAT, ROUNDS = "/v1/completions", "/v1/chat/completions", "/v1/coppice/rounds"
BODY = {"model": MODEL, "prompt": "ab", "max_tokens": 3, "logprobs": 2}
SAID = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
RETRY = "type.googleapis.com/google.rpc.RetryInfo"
NUM_REQUESTS, CHECK_EVERY = 600, 25


async def asked(address: str, chance: random.Random) -> tuple[Answered, int]:
    """The answer to a request, and the choices that it must have."""
    deadline: dict[str, Any] = {"x_request_timeout": "0.5"}
    stream = {"stream": chance.random() < 0.5}
    kind = chance.randrange(7)
    if kind < 2:
        count, prompts = chance.choice((1, 1, 3)), chance.choice((["ab"], ["ab", "cd"]))
        return await post(address, COMPLETIONS, {**BODY, **stream, "n": count, "prompt": prompts}, **deadline), (
            count * len(prompts)
        )
    if kind < 4:
        tools = {"tools": [TOOL], "tool_choice": chance.choice(("auto", "required"))} if chance.random() < 0.5 else {}
        return await post(
            address, CHAT, {**SAID, **stream, **tools, "logprobs": True, "top_logprobs": 1}, **deadline
        ), 1
    if kind == 4:
        return await post(address, "/tokenize", {"prompt": "ab", "return_token_strs": True}, **deadline), 0
    if kind == 5:
        return await get(address, "/v1/models"), 0
    return await get(address, ROUNDS), 0


def check(answer: Answered, num_choices: int) -> str:
    """How a request ended: with an error, or with all its choices at their ends."""
    events: list[Any] = []
    if answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream"):
        events = answer.events
        assert not any("error" in event for event in events[:-1])
        content = events[-1] if events else {}
    else:
        content = answer.content
    if "error" in content:
        assert content["error"].keys() == {"message", "type", "param", "code"}
        assert "internal error" not in content["error"]["message"]
        assert bool(events) == (answer.status == 200)
        return f"{'event' if events else answer.status} {content['error']['code']}"
    assert answer.status == 200
    shown = [choice for event in events or [content] for choice in event.get("choices", ())]
    ends = Counter(choice["index"] for choice in shown if choice["finish_reason"] is not None)
    assert ends == Counter(range(num_choices))
    return "200"


async def test_no_answer_of_an_orchestrator_makes_a_gateway_crash_hang_or_end_as_if_all_were_well(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hostile, counts = HostileOrchestrator(), Counter[str]()
    async with orchestrating(hostile) as orchestrator, gateway_to(orchestrator) as address:
        for first in range(0, NUM_REQUESTS, CHECK_EVERY):
            hostile.chance = random.Random(f"1/{first}")
            for number in range(first, first + CHECK_EVERY):
                async with asyncio.timeout(DEADLINE_S):
                    answer, num_choices = await asked(address, random.Random(f"2/{number}"))
                try:
                    counts[check(answer, num_choices)] += 1
                except (AssertionError, KeyError, ValueError) as error:
                    raise AssertionError(f"number {number}: {answer}") from error
            hostile.chance = None
            # What the gateway knows of the model may be a lie.
            assert (await get(address, "/v1/models")).content["data"][0]["id"] == MODEL
            answer = await post(address, COMPLETIONS, BODY)
            assert [one["text"] for one in answer.content["choices"]] == [TEXT]
    assert hostile.num_hostile > NUM_REQUESTS / 2
    assert min(counts["200"], counts["502 broken_answer"], counts["event broken_answer"]) > 0, counts
    tracebacks = [
        record.getMessage() for record in caplog.records if record.exc_info and not record.name.startswith("grpc")
    ]
    assert not tracebacks


def of_another_output(messages: list[Any]) -> list[Any]:
    return [*messages[:1], *output(2**32 - 1)[1:2], *messages[1:]]


def after_the_end(messages: list[Any]) -> list[Any]:
    return [*messages, inference_pb2.GenerateResponse(text="more")]


def with_two_ends(messages: list[Any]) -> list[Any]:
    return [*messages, messages[-1]]


def without_end(messages: list[Any]) -> list[Any]:
    return messages[:-1]


def of_nothing(messages: list[Any]) -> list[Any]:
    return []


def with_log_probs_too_few(messages: list[Any]) -> list[Any]:
    messages[1].log_probs[0].top_log_probs.pop()
    return messages


LIES = [of_another_output, after_the_end, with_two_ends, without_end, of_nothing, with_log_probs_too_few]


@pytest.mark.parametrize("lie", LIES)
async def test_a_broken_answer_is_an_error_whole_and_in_a_stream(lie: Any, caplog: pytest.LogCaptureFixture) -> None:
    hostile = HostileOrchestrator(lie=lambda method, messages: lie(messages) if method == "Generate" else messages)
    async with orchestrating(hostile) as orchestrator, gateway_to(orchestrator) as address:
        for path, body in ((COMPLETIONS, BODY), (CHAT, {**SAID, "logprobs": True})):
            whole = await post(address, path, body)
            assert (whole.status, whole.error["code"]) == (502, "broken_answer")
            streamed = await post(address, path, {**body, "stream": True})
            last = streamed.events[-1] if streamed.status == 200 else streamed.content
            assert last["error"] == whole.error
    assert not any(record.exc_info for record in caplog.records if not record.name.startswith("grpc"))


def without_a_state(event: inference_pb2.WatchRoundsResponse) -> None:
    del event.round.node_states[0]


def with_no_probability(event: inference_pb2.WatchRoundsResponse) -> None:
    event.round.tree.log_probs[0] = 1e30


def changing_first(change: Callable[[Any], None]) -> Callable[[str, list[Any]], list[Any]]:
    """A lie about the first message of a watch."""

    def lie(method: str, messages: list[Any]) -> list[Any]:
        if method == "WatchRounds":
            change(messages[0])
        return messages

    return lie


@pytest.mark.parametrize("change", [without_a_state, with_no_probability])
async def test_a_round_whose_parts_do_not_fit_is_an_error(change: Callable[[Any], None]) -> None:
    hostile = HostileOrchestrator(lie=changing_first(change))
    async with orchestrating(hostile) as orchestrator, gateway_to(orchestrator) as address:
        refused = await get(address, ROUNDS)
    assert (refused.status, refused.error["code"]) == (502, "broken_answer")


async def test_events_of_an_unknown_kind_are_left_out() -> None:
    hostile = HostileOrchestrator(lie=changing_first(lambda event: event.Clear()))
    async with orchestrating(hostile) as orchestrator, gateway_to(orchestrator) as address:
        assert [event["object"] for event in (await get(address, ROUNDS)).events] == ["coppice.load"]


async def test_texts_that_are_not_those_of_the_tokens_are_an_error() -> None:
    hostile = HostileOrchestrator()
    async with orchestrating(hostile) as orchestrator, gateway_to(orchestrator) as address:
        assert (await post(address, "/tokenize", {"prompt": "ab", "return_token_strs": True})).status == 200

        def lie(method: str, messages: list[Any]) -> list[Any]:
            if method == "Tokenize":
                messages[0].tokens.pop()
            return messages

        hostile.lie = lie
        answer = await post(address, "/tokenize", {"prompt": "ab", "return_token_strs": True})
    assert (answer.status, answer.error["code"]) == (502, "broken_answer")


async def test_of_answers_to_a_call_for_one_no_more_than_two_are_read() -> None:
    sent = []

    def lie(method: str, messages: list[Message]) -> Any:
        while True:
            sent.append(method)
            yield messages[0]

    hostile: Any = HostileOrchestrator(lie=lie)
    async with orchestrating(hostile) as orchestrator, gateway_to(orchestrator) as address:
        async with asyncio.timeout(3.0):
            answer = await get(address, "/v1/models")
    assert answer.status == 500
    assert "not one" in answer.error["message"]


@pytest.mark.parametrize(
    "details", [b"\xff\xff", Status(details=[Packed(type_url=RETRY, value=b"\x0a\x7f")]).SerializeToString()]
)
def test_details_that_cannot_be_read_leave_the_status(details: bytes) -> None:
    told = grpc.aio.Metadata(("grpc-status-details-bin", details))
    error = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), told, "no")
    failed = RequestFailedError(error)
    assert (failed.code.name, failed.details, failed.retry_after_s) == ("RESOURCE_EXHAUSTED", "no", None)
