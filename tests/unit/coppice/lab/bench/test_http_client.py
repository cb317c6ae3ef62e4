"""Requests of a benchmark over HTTP, through a real gateway to a toy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from coppice.client import Client, RequestFailedError
from coppice.core.errors import OverloadedError, UnavailableError
from coppice.lab.bench.client import Answer, Fate, Manner, Mode, Policy, Task, Window
from coppice.lab.bench.http_client import GatewayClient
from coppice.v1 import inference_pb2
from orchestrator.api.validation import GenerationRequest
from tests.http_client import gateway_to
from tests.toy_deployment import ToyDeployment, serving_toy

FORCED = Policy("forced", Mode.MODE_FORCED, max_nodes=4, sources=("toy",))
TASKS = [Task(tuple(b"def f"), 12, temperature, seed, 1.1) for temperature in (0.0, 0.9) for seed in (3, 2**40)]


class Toy(ToyDeployment):
    """Hears requests, and fails every one with `error`, if any."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self._error = error
        self.heard: list[inference_pb2.GenerateRequest] = []
        self.is_idle = asyncio.Event()

    def leave(self, ended: bool) -> None:
        super().leave(ended)
        if not self.num_running:
            self.is_idle.set()

    def hear(self, request: inference_pb2.GenerateRequest) -> None:
        self.heard.append(request)

    async def check(self, request: Any) -> GenerationRequest:
        if self._error is not None:
            raise self._error
        return await super().check(request)


@contextlib.asynccontextmanager
async def both(toy: Toy) -> AsyncIterator[tuple[Client, GatewayClient]]:
    async with serving_toy(toy) as address, Client(address) as client, gateway_to(address) as http_address:
        yield client, GatewayClient(http_address, "toy")


async def asked(client: Any, *tasks: Task, **manner: Any) -> list[Answer]:
    window = Window(client, FORCED)
    return list(await asyncio.gather(*(window.ask(task, salt="salt", **manner) for task in tasks)))


async def test_requests_and_answers_are_those_of_grpc() -> None:
    toy = Toy()
    async with both(toy) as (client, over_http):
        expected, found = await asked(client, *TASKS), await asked(over_http, *TASKS)
    assert {answer.fate for answer in (*expected, *found)} == {Fate.COMPLETED}
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert all(len(answer.deltas) > 1 for answer in found)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.completion is not None
        assert theirs.completion is not None
        assert mine.completion.speculation.rounds == theirs.completion.speculation.rounds > 0
        assert mine.completion.speculation.draft_tokens == theirs.completion.speculation.draft_tokens > 0
        assert (mine.completion.text, mine.completion.finish_reason) == (theirs.completion.text, "length")
    by_grpc, by_http = toy.heard[: len(TASKS)], toy.heard[len(TASKS) :]
    for one in by_http:
        one.ClearField("request_id")
        # Over HTTP ids of tokens have to be asked for.
        one.response.ClearField("token_ids")
        one.ClearField("response")
    assert sorted(map(str, by_http)) == sorted(map(str, by_grpc))


async def test_refusals_and_failures_are_told_apart() -> None:
    async with both(Toy(OverloadedError("full", 0.5))) as (_, over_http):
        [answer] = await asked(over_http, TASKS[0])
    assert (answer.fate, answer.retry_after_s) == (Fate.REFUSED, 0.5)
    async with both(Toy(UnavailableError("gone"))) as (_, over_http):
        [answer] = await asked(over_http, TASKS[0])
    assert answer.fate is Fate.FAILED
    assert "not available" in answer.error
    [answer] = await asked(GatewayClient("127.0.0.1:1", "toy"), TASKS[0])
    assert answer.fate is Fate.FAILED
    assert "ConnectionRefusedError" in answer.error


async def test_a_client_that_leaves_ends_the_request_at_the_server() -> None:
    toy = Toy()
    toy.pass_s = 0.05
    async with both(toy) as (_, over_http):
        [answer] = await asked(over_http, Task(tuple(b"def f"), 200, 0.0, 1), manner=Manner(leave_after_s=0.4))
        assert answer.fate is Fate.LEFT
        assert 0 < len(answer.token_ids) < 200
        async with asyncio.timeout(5):
            await toy.is_idle.wait()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\ndata: ", "ended before the answer did"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\ndata: [DONE]\n\n", "the stream has no end"),
        (b"nonsense\r\n\r\n", "HttpParser"),
    ],
)
async def test_a_broken_answer_is_a_failure(answer: bytes, message: str) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        stream = GatewayClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "toy").stream_request(
            FORCED.message(TASKS[0]), 5.0
        )
        with pytest.raises(RequestFailedError, match=message):
            async for _ in stream:
                pass
        with pytest.raises(RuntimeError):
            stream.result()
