"""`coppice chat` keeps the conversation, obeys its commands, and outlives an answer that fails or is stopped."""

from __future__ import annotations

import asyncio
import builtins
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, cast

import grpc
import pytest
import typer
from typer.testing import CliRunner

from coppice.cli.__main__ import app
from coppice.cli.chat import Conversation
from coppice.client import Chunk, Client, Options, RequestFailedError
from coppice.completion import Completion, Speculation, Timing, Usage

COMPLETION = Completion(
    request_id="r",
    seed=1,
    text="Fine, thanks.",
    token_ids=(5, 6, 7, 8),
    finish_reason="eos",
    stop_match=None,
    usage=Usage(3, 4),
    speculation=Speculation(rounds=2, draft_tokens=8, accepted_tokens=2, mean_acceptance_length=2.0),
    timing=Timing(),
)


class ScriptedStream:
    """Two chunks; after the first it interrupts the process, where it is to be stopped."""

    def __init__(self, behaviour: str) -> None:
        self._behaviour = behaviour
        self._is_cancelled = asyncio.Event()

    def cancel(self) -> None:
        self._is_cancelled.set()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        if self._behaviour == "fail":
            error = grpc.aio.AioRpcError(
                grpc.StatusCode.UNIMPLEMENTED, grpc.aio.Metadata(), grpc.aio.Metadata(), details="no chat template"
            )
            raise RequestFailedError(error)
        yield Chunk("Fine,", (5, 6))
        if self._behaviour == "stop":
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.wait_for(self._is_cancelled.wait(), 5.0)
            raise asyncio.CancelledError
        yield Chunk(" thanks.", (7, 8))

    def result(self) -> Completion:
        return COMPLETION


class ScriptedClient:
    """Writes down what it was asked; a question's own text says what becomes of the answer."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[tuple[str, str]], Options]] = []

    def stream_chat(self, messages: Sequence[Mapping[str, str]], options: Options, timeout_s: float) -> Any:
        self.asked.append(([(message["role"], message["content"]) for message in messages], options))
        return ScriptedStream(messages[-1]["content"])


async def talk(lines: Iterable[str], monkeypatch: pytest.MonkeyPatch, system: str = "") -> ScriptedClient:
    """A conversation whose person says these lines and then ends the input."""
    left = iter(lines)

    def read(_prompt: str = "") -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", read)
    client = ScriptedClient()
    await Conversation(cast(Client, client), Options(max_tokens=9), system, 1.0).run()
    return client


async def test_an_answer_is_part_of_what_follows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = await talk(["hello", "", "again"], monkeypatch, system="Be kind.")
    first, second = (messages for messages, _ in client.asked)
    assert first == [("system", "Be kind."), ("user", "hello")]
    assert second == [*first, ("assistant", "Fine, thanks."), ("user", "again")]
    output = capsys.readouterr()
    assert output.out == "Fine, thanks.\n" * 2
    assert "4 tokens" in output.err
    assert "τ 2.00" in output.err


async def test_commands_are_no_questions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["one", "/speculation off", "two", "/clear", "/speculation on", "three", "/nonsense", "/exit", "never"]
    client = await talk(lines, monkeypatch)
    assert [messages[-1][1] for messages, _ in client.asked] == ["one", "two", "three"]
    assert [options.speculation for _, options in client.asked] == ["auto", "off", "auto"]
    assert [len(messages) for messages, _ in client.asked] == [1, 3, 1]
    assert "no such command" in capsys.readouterr().err


async def test_ctrl_c_stops_the_answer_and_not_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = await talk(["stop", "go on"], monkeypatch)
    messages, _ = client.asked[-1]
    assert messages == [("user", "stop"), ("assistant", "Fine,"), ("user", "go on")]
    assert "stopped" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


async def test_a_question_that_fails_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    client = await talk(["fail", "hello"], monkeypatch)
    messages, _ = client.asked[-1]
    assert messages == [("user", "hello")]
    assert "UNIMPLEMENTED: no chat template" in capsys.readouterr().err


async def test_a_script_hears_of_a_question_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    with pytest.raises(typer.Exit) as ended:
        await talk(["fail", "hello"], monkeypatch)
    assert ended.value.exit_code == 1


async def test_a_line_that_is_no_text_is_said_so_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    # As Python reads a byte of Latin-1.
    client = await talk(["caf\udce9", "hello"], monkeypatch)
    assert [messages for messages, _ in client.asked] == [[("user", "hello")]]
    assert "coppice: not valid text: " in capsys.readouterr().err


def test_a_system_message_that_is_no_text_is_refused_before_anything_starts() -> None:
    ended = CliRunner().invoke(app, ["chat", "--system", "caf\udce9"])
    assert ended.exit_code == 2
    assert "--system" in ended.output
