"""Several outputs as one stream of messages: one that cannot begin, and a first one without a token."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

import pytest

from coppice.core.errors import CoppiceError, UnavailableError
from coppice.v1 import inference_pb2
from orchestrator.request.output_text import OutputDelta
from orchestrator.request.outputs import OneOutput, Outputs
from orchestrator.request.rounds import Finish


class Script:
    """Stands in for a generation: says what a test tells it to say."""

    def __init__(self, wake: asyncio.Event, refuses: bool = False) -> None:
        self._wake = wake
        self._refuses = refuses
        self._tokens: list[int] = []
        self.state = "new"
        self.num_generated = 0
        self.finish: Finish | None = None
        self.error: CoppiceError | None = None

    def __enter__(self) -> Script:
        if self._refuses:
            raise UnavailableError("no verifier")
        self.state = "running"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.state = "freed"

    def say(self, token: int, last: bool = False) -> None:
        assert self.state == "running"
        self._tokens.append(token)
        self.num_generated += 1
        if last:
            self.finish = Finish(1)  # type: ignore[arg-type]
        self._wake.set()

    def end(self) -> None:
        self.finish = Finish(1)  # type: ignore[arg-type]
        self._wake.set()

    def take(self) -> OutputDelta:
        taken, self._tokens = self._tokens, []
        return OutputDelta(token_ids=tuple(taken))


class Telling:
    """Stands in for the messages of an output."""

    def __init__(self, index: int) -> None:
        self._index = index

    def delta(self, delta: OutputDelta) -> inference_pb2.GenerateResponse:
        return inference_pb2.GenerateResponse(token_ids=delta.token_ids, output_index=self._index)

    def last(self, generation: Any, finish: Finish) -> inference_pb2.GenerateResponse:
        message = self.delta(generation.take())
        message.finished.reason = finish.reason
        return message


def cast(number: int, *, first_alone: bool, refusing: int | None = None) -> tuple[list[Script], Outputs]:
    wake = asyncio.Event()
    scripts = [Script(wake, refuses=index == refusing) for index in range(number)]
    outputs = [OneOutput(script, Telling(index)) for index, script in enumerate(scripts)]  # type: ignore[arg-type]
    return scripts, Outputs(outputs, wake, first_alone=first_alone)


def states(scripts: list[Script]) -> list[str]:
    return [script.state for script in scripts]


async def told(messages: Any) -> tuple[int, list[int], bool]:
    async with asyncio.timeout(5):
        message = await anext(messages)
    return message.output_index, list(message.token_ids), message.HasField("finished")


async def test_one_that_cannot_begin_frees_those_that_have() -> None:
    scripts, outputs = cast(3, first_alone=False, refusing=2)
    with pytest.raises(UnavailableError, match="no verifier"), outputs:
        pass
    assert states(scripts) == ["freed", "freed", "new"]
    scripts, outputs = cast(3, first_alone=True, refusing=2)
    with outputs:
        scripts[0].say(1)
        with pytest.raises(UnavailableError, match="no verifier"):
            await anext(outputs.messages())
    assert states(scripts) == ["freed", "freed", "new"]


async def test_the_others_begin_where_the_first_ends_without_a_token() -> None:
    """Its grammar allows nothing but the empty text; theirs, too."""
    scripts, outputs = cast(2, first_alone=True)
    with outputs:
        messages = outputs.messages()
        scripts[0].end()
        assert await told(messages) == (0, [], True)
        waits = asyncio.ensure_future(told(messages))
        await asyncio.sleep(0)
        assert scripts[1].state == "running"
        scripts[1].end()
        assert await waits == (1, [], True)
