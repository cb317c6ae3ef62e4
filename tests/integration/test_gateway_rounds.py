"""`/v1/coppice/rounds` and the page's files: events, refusals, clients that leave, a gateway that stops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from coppice.gateway.page_files import PATHS
from tests.conftest import StartFakes
from tests.fakes import FakeDrafter, FakeVerifier, eventually, perfect
from tests.http_client import chunk_of, gateway_to, get, head_of, opened, post, request_bytes
from tests.integration.test_tokens import tenants

ROUNDS = "/v1/coppice/rounds"
BODY = {"model": "toy", "prompt": "def ", "max_tokens": 30, "seed": 7, "return_token_ids": True}


@contextlib.asynccontextmanager
async def watching(address: str, path: str = ROUNDS, **headers: str) -> AsyncIterator[AsyncIterator[Any]]:
    """Events of a stream as they come, None for `[DONE]`."""
    reader, writer = await opened(address)
    writer.write(request_bytes("GET", path, headers=headers))
    status, told = await head_of(reader)
    assert (status, told["content-type"]) == (200, "text/event-stream; charset=utf-8")

    async def events() -> AsyncIterator[Any]:
        while part := await chunk_of(reader):
            text = part.decode().strip().removeprefix("data: ")
            yield None if text == "[DONE]" else json.loads(text)

    try:
        yield events()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_rounds_come_as_events(start_fakes: StartFakes) -> None:
    async with (
        start_fakes(FakeVerifier(), FakeDrafter(perfect(depth=3)), watch_rounds=True) as (_, one),
        gateway_to(one.address) as address,
        watching(address) as events,
    ):
        load = await anext(events)
        assert load["object"] == "coppice.load"
        assert load.keys() >= {"time", "running", "waiting", "planned_nodes", "generated_tokens", "verifiers"}
        answer = await post(address, "/v1/completions", BODY)
        [choice] = answer.content["choices"]
        rounds: list[Any] = []
        async with asyncio.timeout(10):
            while sum(len(one["tokens"]) for one in rounds) < 30:
                event = await anext(events)
                rounds += [event] if event["object"] == "coppice.round" else []
    assert [token["id"] for one in rounds for token in one["tokens"]] == choice["token_ids"]
    assert "".join(token["text"] for one in rounds for token in one["tokens"]) == choice["text"]
    assert {one["request_id"] for one in rounds} == {answer.headers["x-request-id"]}
    nodes = [node for one in rounds for node in one["nodes"]]
    assert sum(node["state"] == "accepted" for node in nodes) == choice["coppice"]["accepted_tokens"]
    assert all(node["sources"] == ["small-lm"] for node in nodes)
    first = next(one for one in rounds if len(one["nodes"]) == 3)
    assert [node["parent"] for node in first["nodes"]] == [-1, 0, 1]
    assert all(0 < node["probability"] <= 1 for node in nodes)


async def test_it_is_refused_where_it_is_off_or_without_a_token(start_fakes: StartFakes, tmp_path: Path) -> None:
    async with start_fakes(FakeVerifier()) as (_, one), gateway_to(one.address) as address:
        off = await get(address, ROUNDS)
    (tmp_path / "tokens").write_text(tenants(alice={}))
    settings = {"tokens_file": str(tmp_path / "tokens"), "watch_rounds": True}
    async with start_fakes(FakeVerifier(), **settings) as (_, one), gateway_to(one.address) as address:
        nameless = await get(address, ROUNDS)
        async with watching(address, authorization="Bearer alice!") as events:
            assert (await anext(events))["object"] == "coppice.load"
    assert (off.status, off.error["code"]) == (404, "not_enabled")
    assert (nameless.status, nameless.error["code"]) == (401, "invalid_api_key")


async def test_a_request_can_be_watched_alone_and_a_client_that_leaves_ends_its_watch(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(), watch_rounds=True) as (_, one), gateway_to(one.address) as address:
        feed = one.service._round_feed
        assert feed is not None
        async with watching(address, f"{ROUNDS}?request_id=mine") as events:
            await anext(events)
            for identity in ("other", "mine"):
                await post(address, "/v1/completions", BODY, x_request_id=identity)
            async with asyncio.timeout(10):
                while (event := await anext(events))["object"] != "coppice.round":
                    pass
            assert event["request_id"] == "mine"
        await eventually(lambda: not feed.is_watched)


async def test_a_gateway_that_stops_ends_its_streams_at_once(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(), watch_rounds=True) as (_, one), contextlib.AsyncExitStack() as stack:
        address = await stack.enter_async_context(gateway_to(one.address, grace_s=30.0))
        async with watching(address) as events, asyncio.timeout(10):
            await anext(events)
            stopping = asyncio.create_task(stack.pop_all().aclose())
            last = [event async for event in events][-2:]
            await stopping
    assert last[0]["error"]["code"] == "unavailable"
    assert last[1] is None


async def test_the_page_has_no_address_but_its_own(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier()) as (_, one), gateway_to(one.address) as address:
        for path in PATHS:
            answer = await get(address, path)
            assert answer.status == 200
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            text = answer.body.decode()
            # The one name of another host is that of SVG.
            assert set(re.findall(r"https?://[^\s\"'`]+", text)) <= {"http://www.w3.org/2000/svg"}
            again = await get(address, path, if_none_match=answer.headers["etag"])
            assert (again.status, again.body) == (304, b"")
        # Every script that another loads is served.
        texts = [(await get(address, path)).body.decode() for path in PATHS]
    loaded = {name for text in texts for name in re.findall(r"\"(/page/[\w.]+)\"", text)}
    assert loaded == set(PATHS) - {"/"}
    assert {one.name for one in (files("coppice.gateway") / "page").iterdir()} == set(PATHS.values())
