"""`coppice generate` sees mistakes in its options before it loads a model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest
from typer.testing import CliRunner

from coppice.cli import generate
from coppice.cli.__main__ import app
from coppice.client import Chunk, RequestFailedError


def connected(*_: object) -> None:
    raise AssertionError("it goes on")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--prompt", "a", "--temperature", "nan"], "--temperature: must be in [0, 100]"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature: must be in [0, 100]"),
        (["--prompt", "a", "--top-p", "1.5"], "--top-p: must be in (0, 1]"),
        (["--prompt", ""], "must not be empty"),
        (["--token-ids", ""], "must not be empty"),
        (["--prompt", "a", "--json-schema", "{bad"], "--json-schema: is not JSON"),
        (["--prompt", "a", "--address", "http://127.0.0.1:1"], "--address: must be HOST:PORT"),
        (["--prompt", "a", "--address", "127.0.0.1:1", "--target", "other"], "--target: cannot go with --address"),
        (["--prompt", "a", "--address", "127.0.0.1:1", "--threads", "2"], "--threads: cannot go with --address"),
        (["--prompt", "a", "--address", "127.0.0.1:1", "--token", "\u00e9"], "--token: must be printable ASCII"),
        (["--token-ids", "1,x"], "--token-ids: must be unsigned 32-bit numbers with commas between, got 'x'"),
        (["--token-ids", "4294967296"], "got '4294967296'"),
        (["--prompt", "a", "--speculation", "fast"], "got 'fast'"),
        (["--prompt", "a", "--top-log-probs", "3"], "--top-log-probs: needs --json"),
        (["--prompt", "a", "--speculation", "small-lm,fast"], "got 'fast'"),
    ],
)
def test_a_mistake_is_seen_before_anything_starts(
    options: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--address" not in options:
        monkeypatch.setattr(generate, "connected", connected)
    ended = CliRunner().invoke(app, ["generate", *options])
    assert ended.exit_code == 2
    assert complaint in ended.output


@pytest.mark.parametrize("speculation", ["auto", "off", "cache", "small-lm, prompt-lookup"])
def test_sources_that_a_topology_may_have_are_no_mistake(speculation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "connected", connected)
    ended = CliRunner().invoke(app, ["generate", "--prompt", "a", "--speculation", speculation])
    assert isinstance(ended.exception, AssertionError)


def test_up_reads_the_file_of_tokens_before_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENS_FILE", "/nowhere/tokens")
    ended = CliRunner().invoke(app, ["up"])
    assert ended.exit_code == 2
    assert "TOKENS_FILE: " in ended.output
    assert "/nowhere/tokens" in ended.output


def test_several_verifiers_are_not_colocated() -> None:
    ended = CliRunner().invoke(app, ["up", "--colocated", "--verifiers", "2"])
    assert ended.exit_code == 2
    assert "--colocated: several verifiers are processes of their own" in ended.output


@pytest.mark.parametrize(
    ("options", "port"),
    [
        (["--port", "51051", "--http-port", "51051"], 51051),
        (["--http-port", "51051", "--metrics-port", "51050"], 51051),
        (["--port", "51051", "--metrics-port", "51051", "--colocated"], 51051),
    ],
)
def test_up_refuses_a_port_that_is_asked_for_twice(options: list[str], port: int) -> None:
    ended = CliRunner().invoke(app, ["up", *options])
    assert ended.exit_code == 2
    assert f"port {port} is asked for twice" in ended.output


def test_the_reason_of_a_failure_has_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata(), grpc.aio.Metadata(), "late")

    class Cut:
        """A stream that is cut after some text."""

        async def __aiter__(self) -> AsyncIterator[Chunk]:
            yield Chunk("some", (1,))
            raise RequestFailedError(error)

    class Cutting:
        """A client of such streams."""

        def stream_request(self, *_: object) -> Cut:
            return Cut()

    @contextlib.asynccontextmanager
    async def connected_to_it(_: object) -> AsyncIterator[Cutting]:
        yield Cutting()

    monkeypatch.setattr(generate, "connected", connected_to_it)
    with pytest.raises(RequestFailedError):
        asyncio.run(generate._complete(cast(Any, None), cast(Any, None), 1.0, streams=True))
    assert capsys.readouterr().out == "some\n"
