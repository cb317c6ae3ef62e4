"""`WatchRounds`: rounds with their trees and states, access by tenant, readers that are slow, its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from coppice.cli.__main__ import app
from coppice.client import Client, Options, RequestFailedError, build_request
from coppice.core.tree import TokenTree
from coppice.v1 import inference_pb2
from orchestrator.api import service
from orchestrator.request.round_feed import MAX_UNREAD, MAX_WATCHES
from tests.conftest import StartFakes, orchestrator_on_fakes
from tests.fakes import FakeDrafter, FakeVerifier, eventually, perfect
from tests.integration.test_tokens import tenants
from tests.toy_target import babble, plain

PROMPT = [ord(character) for character in "def "]
OPTIONS = Options(max_tokens=30, seed=7, ignore_eos=True)
ACCEPTED, REJECTED, PRUNED = (
    inference_pb2.NODE_STATE_ACCEPTED,
    inference_pb2.NODE_STATE_REJECTED,
    inference_pb2.NODE_STATE_PRUNED,
)
Message = inference_pb2.WatchRoundsResponse


def bushy(tokens: Sequence[int], seed: int, max_nodes: int) -> TokenTree:
    """A token that is right, its wrong child, and two unlikely ones."""
    right = plain(babble, tokens, 2, seed)
    wrong = (right[1] + 1) % 256
    return TokenTree((right[0], wrong, wrong, wrong), (-1, 0, 1, 2), (-0.1, -0.2, -3.0, -3.0))


@contextlib.asynccontextmanager
async def watched(client: Client, request_id: str = "") -> AsyncIterator[list[Message]]:
    """Messages of a watch that is on, as they come."""
    messages: list[Message] = []

    async def read() -> None:
        async for message in client.watch_rounds(request_id):
            messages.append(message)

    reading = asyncio.create_task(read())
    try:
        await eventually(lambda: bool(messages))
        yield messages
    finally:
        reading.cancel()
        await asyncio.wait({reading})


def rounds_of(messages: list[Message]) -> list[inference_pb2.RoundReport]:
    return [message.round for message in messages if message.HasField("round")]


async def test_rounds_have_their_tokens_and_every_node_has_its_state() -> None:
    verifier = FakeVerifier(reroots=True)
    async with (
        orchestrator_on_fakes(verifier, FakeDrafter(bushy), watch_rounds=True, max_nodes=2) as (client, _),
        watched(client) as messages,
    ):
        completion = await client.generate(PROMPT, OPTIONS)
        await eventually(lambda: sum(len(one.token_ids) for one in rounds_of(messages)) == 30)
    rounds = rounds_of(messages)
    assert [token for one in rounds for token in one.token_ids] == list(completion.token_ids)
    assert all(bytes(one.token_ids) == b"".join(one.tokens) for one in rounds)
    assert len(rounds) == completion.speculation.rounds
    assert {one.request_id for one in rounds} == {completion.request_id}
    base = len(PROMPT)
    for one in rounds:
        assert one.base_length == base
        base += len(one.token_ids)
        tree, states = one.tree, list(one.node_states)
        assert len(tree.token_ids) == len(tree.parents) == len(states) == len(one.node_tokens)
        accepted = [token for token, state in zip(tree.token_ids, states, strict=True) if state == ACCEPTED]
        assert accepted == list(one.token_ids[: len(accepted)])
    counts = [list(one.node_states).count(ACCEPTED) for one in rounds]
    assert sum(counts) == completion.speculation.accepted_tokens
    verified = sum(state in (ACCEPTED, REJECTED) for one in rounds for state in one.node_states)
    assert verified == completion.speculation.draft_tokens
    # The budget has room for two of four.
    full = next(one for one in rounds if len(one.node_states) == 4)
    assert list(full.node_states) == [ACCEPTED, REJECTED, PRUNED, PRUNED]
    assert (list(full.tree.source_names), full.budget) == (["small-lm"], 2)
    assert rounds[0].round_us == 0
    assert all(one.round_us > 0 for one in rounds[1:])


async def test_the_load_comes_at_once_and_again(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier(pass_s=0.05)
    async with start_fakes(verifier, watch_rounds=True) as (client, _), watched(client) as messages:
        assert messages[0].HasField("load")
        assert messages[0].load.running == 0
        await client.generate(PROMPT, OPTIONS)
        loads = [message.load for message in messages if message.HasField("load")]
        assert any(load.running == 1 for load in loads)
        assert loads[-1].generated_tokens > 0


async def test_one_request_can_be_watched_alone(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(), watch_rounds=True) as (client, _), watched(client, "mine") as messages:
        for identity in ("other", "mine"):
            request = build_request(PROMPT, OPTIONS)
            request.request_id = identity
            await client.send(request)
        await eventually(lambda: sum(len(one.token_ids) for one in rounds_of(messages)) == 30)
    assert {one.request_id for one in rounds_of(messages)} == {"mine"}


async def test_it_is_off_unless_it_is_wanted(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier()) as (client, _):
        with pytest.raises(RequestFailedError) as caught:
            await anext(client.watch_rounds())
    assert caught.value.code == grpc.StatusCode.UNIMPLEMENTED
    assert "WATCH_ROUNDS" in caught.value.details


async def test_a_tenant_sees_its_own_requests_and_an_admin_all(start_fakes: StartFakes, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(tenants(alice={}, bob={}, root={"admin": True}))
    settings = {"tokens_file": str(tmp_path / "tokens"), "watch_rounds": True}
    async with start_fakes(FakeVerifier(), **settings) as (nameless, one), contextlib.AsyncExitStack() as stack:
        clients, seen = {}, {}
        for name in ("alice", "bob", "root"):
            clients[name] = await stack.enter_async_context(Client(one.address, token=f"{name}!"))
            seen[name] = await stack.enter_async_context(watched(clients[name]))
        ids = {}
        for name in ("alice", "bob"):
            ids[name] = (await clients[name].generate(PROMPT, OPTIONS)).request_id
        await eventually(lambda: sum(len(one.token_ids) for one in rounds_of(seen["root"])) == 60)
        with pytest.raises(RequestFailedError) as caught:
            await anext(nameless.watch_rounds())
    told = {name: {one.request_id for one in rounds_of(messages)} for name, messages in seen.items()}
    assert told == {"alice": {ids["alice"]}, "bob": {ids["bob"]}, "root": set(ids.values())}
    assert caught.value.code == grpc.StatusCode.UNAUTHENTICATED


async def test_a_reader_that_is_slow_misses_the_oldest_rounds_and_slows_no_request(start_fakes: StartFakes) -> None:
    verifier = FakeVerifier(pass_s=0.0, max_context_tokens=100_000)
    async with start_fakes(verifier, watch_rounds=True) as (client, one), Client(one.address) as slow:
        messages = client.watch_rounds()
        assert (await anext(messages)).HasField("load")
        # The windows of the connection fill first: each round is of a request with a long id.
        request = build_request(PROMPT, Options(max_tokens=20_000, seed=7, ignore_eos=True))
        request.request_id = "x" * 128
        completion = await slow.send(request)
        assert len(completion.token_ids) == 20_000
        assert one.service.tally.num_generated() == 20_000
        missed, last = 0, 0
        async with asyncio.timeout(30):
            async for message in messages:
                missed += message.missed_rounds
                last = message.round.base_length or last
                if last == len(PROMPT) + 20_000 - 1:
                    break
        await messages.aclose()
    assert missed > MAX_UNREAD


async def test_watches_have_a_bound_and_leave_nothing(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier(), watch_rounds=True) as (client, one):
        feed = one.service._round_feed
        assert feed is not None
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(MAX_WATCHES):
                await stack.enter_async_context(watched(client))
            with pytest.raises(RequestFailedError) as caught:
                await anext(client.watch_rounds())
            assert caught.value.code == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert caught.value.retry_after_s
        await eventually(lambda: not feed.is_watched)
        async with watched(client):
            assert feed.is_watched


async def test_a_watch_ends_after_its_time_read_or_not(
    start_fakes: StartFakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_WATCH_S", 1.0)
    monkeypatch.setattr(service, "UNREAD_GRACE_S", 0.5)
    async with (
        start_fakes(FakeVerifier(pass_s=0.0, max_context_tokens=100_000), watch_rounds=True) as (client, one),
        Client(one.address) as other,
    ):
        feed = one.service._round_feed
        assert feed is not None
        unread = other.watch_rounds()
        await anext(unread)
        request = build_request(PROMPT, Options(max_tokens=20_000, seed=7, ignore_eos=True))
        request.request_id = "x" * 128
        sending = asyncio.create_task(client.send(request))
        # One that is read ends by itself; the other is blocked, on a fast machine, and ended a little later.
        assert [message async for message in client.watch_rounds()]
        await eventually(lambda: not feed.is_watched)
        sending.cancel()
        await asyncio.wait({sending})
        await unread.aclose()


async def test_a_server_that_stops_does_not_wait_for_watches() -> None:
    async with contextlib.AsyncExitStack() as stack:
        settings = {"watch_rounds": True, "grace_s": 20.0}
        _, one = await stack.enter_async_context(orchestrator_on_fakes(FakeVerifier(), **settings))
        async with Client(one.address) as client, asyncio.timeout(5):
            messages = client.watch_rounds()
            await anext(messages)
            stopping = asyncio.create_task(stack.pop_all().aclose())
            with pytest.raises(RequestFailedError) as caught:
                async for _ in messages:
                    pass
            await stopping
    assert caught.value.code == grpc.StatusCode.UNAVAILABLE


async def test_top_shows_the_figures_and_the_tree(start_fakes: StartFakes) -> None:
    drafter = FakeDrafter(perfect(depth=3))
    async with start_fakes(FakeVerifier(pass_s=0.05), drafter, watch_rounds=True) as (client, one):
        arguments = ["top", "--address", one.address, "--count", "4"]
        showing = asyncio.create_task(asyncio.to_thread(CliRunner().invoke, app, arguments, env={"COLUMNS": "150"}))
        feed = one.service._round_feed
        assert feed is not None
        await eventually(lambda: feed.is_watched)
        completion = await client.generate(PROMPT, OPTIONS)
        result = await showing
    assert result.exit_code == 0, result.output
    assert completion.request_id in result.output
    assert "tokens/s" in result.output
    assert "✓" in result.output
    assert "the target's own" in result.output


async def test_top_says_why_there_is_nothing_to_see(start_fakes: StartFakes) -> None:
    async with start_fakes(FakeVerifier()) as (_, one):
        result = await asyncio.to_thread(CliRunner().invoke, app, ["top", "--address", one.address])
    assert result.exit_code == 1
    assert "WATCH_ROUNDS" in result.stderr
