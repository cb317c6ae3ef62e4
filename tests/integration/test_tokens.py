"""Bearer tokens at the public API: who gets in, as whom, and within which limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coppice.client import Client, Options, RequestFailedError
from coppice.net import rpc
from coppice.net.access_token import token_digest
from coppice.settings import ConfigError
from coppice.v1 import inference_pb2, inference_pb2_grpc
from tests.conftest import StartFakes
from tests.fakes import FakeVerifier, eventually
from tests.toy_target import babble, plain

PROMPT = [ord(character) for character in "def "]
OPTIONS = Options(max_tokens=5, seed=1, ignore_eos=True)
LONG = Options(max_tokens=200, seed=1, ignore_eos=True)
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def tenants(**limits: dict[str, Any]) -> str:
    """A file in which each tenant's token is its name with an exclamation mark."""
    lines = [{"tenant": name, "sha256": [token_digest(f"{name}!")], **more} for name, more in limits.items()]
    return "\n".join(map(json.dumps, lines))


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(tenants(alice={}, bob={"max_requests": 1, "max_tokens": 20}))
    return path


def rewrite(path: Path, text: str) -> None:
    path.write_text(text)


async def refused(client: Client, options: Options = OPTIONS) -> RequestFailedError:
    with pytest.raises(RequestFailedError) as caught:
        await client.generate(PROMPT, options)
    return caught.value


async def begin(client: Client) -> AsyncIterator[object]:
    """The chunks of a request that has its place."""
    chunks = aiter(client.stream(PROMPT, LONG))
    await anext(chunks)
    return chunks


HEADERS: dict[str, tuple[tuple[str, str | bytes], ...]] = {
    "none": (),
    "wrong": (("authorization", "Bearer wrong"),),
    "empty": (("authorization", "Bearer "),),
    "no scheme": (("authorization", "alice!"),),
    "another scheme": (("authorization", "Basic alice!"),),
    "two": (("authorization", "Bearer alice!"), ("authorization", "Bearer bob!")),
    "its hash": (("authorization", f"Bearer {token_digest('alice!')}"),),
    "in another place": (("x-api-key", "alice!"), ("x-tenant-id", "alice")),
}
METHODS = [
    "/coppice.v1.InferenceService/Generate",
    "/coppice.v1.InferenceService/GetModelInfo",
    "/coppice.v1.InferenceService/Tokenize",
    "/coppice.v1.InferenceService/NoSuchMethod",
    "/coppice.v1.VerifierService/Verify",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/grpc.health.v1.HealthService/Check",
]


async def test_without_a_valid_token_everything_is_refused_with_the_same_words(
    start_fakes: StartFakes, tokens_file: Path
) -> None:
    verifier, told = FakeVerifier(), set()
    async with (
        start_fakes(verifier, tokens_file=str(tokens_file)) as (_, orchestrator),
        rpc.open_channel(orchestrator.address) as channel,
    ):
        for metadata in HEADERS.values():
            for method in METHODS:
                # No message of any method: nobody reads it.
                call = channel.unary_unary(method)(b"\xff\xff\xff", metadata=metadata)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                told.add((caught.value.code(), caught.value.details(), tuple(caught.value.trailing_metadata() or ())))
        counts = orchestrator.service.tally
        assert counts.num_requests == 0
    assert told == {(UNAUTHENTICATED, "a valid bearer token is needed", ())}
    assert not verifier.opened


async def test_with_a_token_all_is_as_it_was(start_fakes: StartFakes, tokens_file: Path) -> None:
    async with (
        start_fakes(FakeVerifier(), tokens_file=str(tokens_file)) as (_, orchestrator),
        Client(orchestrator.address, token="alice!") as client,
    ):
        assert list((await client.generate(PROMPT, OPTIONS)).token_ids) == plain(babble, PROMPT, 5, 1)
        assert (await client.model_info()).model == "toy"


@pytest.mark.parametrize("is_open", [False, True])
async def test_health_is_open_and_reflection_if_it_is_wanted(
    is_open: bool, start_fakes: StartFakes, tokens_file: Path
) -> None:
    settings = {"tokens_file": str(tokens_file), "open_reflection": is_open}
    async with (
        start_fakes(FakeVerifier(), **settings) as (_, orchestrator),
        rpc.open_channel(orchestrator.address) as channel,
    ):
        checked = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]), timeout=5)
        if is_open:
            [answer] = [answer async for answer in call]
            assert "coppice.v1.InferenceService" in str(answer)
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [answer async for answer in call]
            assert caught.value.code() == UNAUTHENTICATED


async def test_a_client_is_the_tenant_of_its_token_and_no_other(start_fakes: StartFakes, tokens_file: Path) -> None:
    verifier = FakeVerifier()
    async with start_fakes(verifier, tokens_file=str(tokens_file)) as (_, orchestrator):
        address = orchestrator.address
        for named, token in (("bob", "alice!"), ("nobody", "alice!")):
            async with Client(address, tenant=named, token=token) as client:
                error = await refused(client)
                assert (error.code, error.fields) == (INVALID, ("x-tenant-id",))
        async with Client(address, tenant="alice", token="alice!") as client:
            await client.generate(PROMPT, OPTIONS)
    assert len(verifier.opened) == 1


async def test_calls_at_the_same_time_do_not_take_each_other_s_tenant(
    start_fakes: StartFakes, tokens_file: Path
) -> None:
    verifier = FakeVerifier()
    async with (
        start_fakes(verifier, tokens_file=str(tokens_file), max_requests=64) as (_, orchestrator),
        Client(orchestrator.address, token="alice!") as alice,
        Client(orchestrator.address, token="bob!") as bob,
    ):
        for seed in (0, 1):
            await asyncio.gather(
                *(alice.generate(PROMPT, Options(max_tokens=5, seed=seed, cache_salt="s")) for _ in range(8)),
                bob.generate(PROMPT, Options(max_tokens=5, seed=seed + 100, cache_salt="s")),
            )
    salts: dict[bool, set[str]] = {True: set(), False: set()}
    for opening in verifier.opened:
        salts[opening.sampling.seed >= 100].add(opening.cache_salt)
    # One of each, the same at all times, and not what the clients said.
    assert [len(found) for found in salts.values()] == [1, 1]
    assert not salts[True] & salts[False]
    assert "s" not in salts[True] | salts[False]


async def test_what_one_tenant_s_output_was_is_drafted_for_itself_and_for_no_other(
    start_fakes: StartFakes, tokens_file: Path
) -> None:
    rewrite(tokens_file, tenants(alice={}, carol={}))
    # What comes during a pass is of use to the next, as with the real verifier; passes are slow enough for that.
    verifier = FakeVerifier(pass_s=0.003, reroots=True)
    settings = {"tokens_file": str(tokens_file), "cache_drafter": True}
    prompt = list(b"def a prompt that is long enough: ")
    rounds = []
    async with start_fakes(verifier, **settings) as (_, orchestrator):
        for name in ("alice", "carol", "alice"):
            async with Client(orchestrator.address, token=f"{name}!") as client:
                options = Options(max_tokens=96, seed=5, ignore_eos=True, cache_salt="one and the same")
                completion = await client.generate(prompt, options)
                assert list(completion.token_ids) == plain(babble, prompt, 96, 5)
                rounds.append(completion.speculation.rounds)
                assert orchestrator.cache is not None
                await orchestrator.cache.flushed()
    alice, carol, alice_again = rounds
    assert carol == alice
    assert alice_again < alice / 2


async def test_limits_hold_for_each_tenant(start_fakes: StartFakes, tokens_file: Path) -> None:
    async with (
        start_fakes(FakeVerifier(pass_s=0.005), tokens_file=str(tokens_file)) as (_, orchestrator),
        Client(orchestrator.address, token="alice!") as alice,
        Client(orchestrator.address, token="bob!") as bob,
    ):
        error = await refused(bob, LONG)
        assert (error.code, error.fields) == (INVALID, ("stopping.max_tokens",))
        # Named by nobody, it is the tenant's.
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=PROMPT))
        request.stopping.ignore_eos = True
        assert len((await bob.send(request)).token_ids) == 20
        running = asyncio.create_task(bob.generate(PROMPT, Options(max_tokens=20, ignore_eos=True)))
        await eventually(lambda: orchestrator.service.num_requests == 1)
        error = await refused(bob)
        assert error.code == EXHAUSTED
        assert error.retry_after_s is not None
        await alice.generate(PROMPT, OPTIONS)
        await running
        await bob.generate(PROMPT, OPTIONS)
        assert orchestrator.service.tally.refused["tenant_limit"] == 1


async def test_tokens_used_are_those_of_the_prompt_and_of_all_outputs(
    start_fakes: StartFakes, tokens_file: Path
) -> None:
    # A minute's worth and more with one request: 4 of the prompt, and 2 x 30.
    rewrite(tokens_file, tenants(alice={"tokens_per_minute": 60}))
    async with (
        start_fakes(FakeVerifier(), tokens_file=str(tokens_file)) as (_, orchestrator),
        Client(orchestrator.address, token="alice!") as client,
    ):
        await client.generate_all(PROMPT, Options(max_tokens=30, ignore_eos=True, num_outputs=2))
        error = await refused(client)
    assert error.code == EXHAUSTED
    # 4 in debt, and 1 to begin with, of one a second.
    assert error.retry_after_s == pytest.approx(5.0, abs=0.5)


async def test_a_token_that_is_taken_back_ends_no_call_and_begins_none(
    start_fakes: StartFakes, tokens_file: Path
) -> None:
    async with (
        start_fakes(FakeVerifier(pass_s=0.005), tokens_file=str(tokens_file)) as (_, orchestrator),
        Client(orchestrator.address, token="alice!") as client,
    ):
        running = await begin(client)
        rewrite(tokens_file, tenants(bob={}))
        assert orchestrator.service.authentication is not None
        await orchestrator.service.authentication.tokens.refresh()
        assert (await refused(client)).code == UNAUTHENTICATED
        rest = [chunk async for chunk in running]
        assert rest


async def test_a_broken_file_stops_the_start_and_is_named(start_fakes: StartFakes, tokens_file: Path) -> None:
    rewrite(tokens_file, "swordfish")
    with pytest.raises(ConfigError, match="TOKENS_FILE: line 1: is not JSON"):
        async with start_fakes(FakeVerifier(), tokens_file=str(tokens_file)):
            pass


async def test_any_language_s_stubs_can_send_a_token(start_fakes: StartFakes, tokens_file: Path) -> None:
    async with (
        start_fakes(FakeVerifier(), tokens_file=str(tokens_file)) as (_, orchestrator),
        rpc.open_channel(orchestrator.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for scheme in ("Bearer", "bearer", "BEARER"):
            metadata = (("authorization", f"{scheme} alice!"),)
            await stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), metadata=metadata, timeout=5)


async def test_no_token_is_in_a_log(
    start_fakes: StartFakes, tokens_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("orchestrator", "coppice", "grpc", "asyncio"):
        caplog.set_level(logging.DEBUG, name)
    async with start_fakes(FakeVerifier(), tokens_file=str(tokens_file)) as (_, orchestrator):
        for token in ("alice!", "mallory's guess"):
            async with Client(orchestrator.address, token=token) as client:
                with contextlib.suppress(RequestFailedError):
                    await client.generate(PROMPT, OPTIONS)
        rewrite(tokens_file, tenants(bob={}))
        assert orchestrator.service.authentication is not None
        await orchestrator.service.authentication.tokens.refresh()
    assert "tokens reloaded" in caplog.text
    for hidden in ("alice!", "mallory", token_digest("alice!"), token_digest("bob!")):
        assert hidden not in caplog.text
