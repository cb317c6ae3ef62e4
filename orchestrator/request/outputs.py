"""Concurrent outputs of one request, as one stream of messages.

Each output is a generation with its own seed. Generations run in callbacks of the streams' readers and need no tasks;
one event signals news of any of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from coppice.core.errors import CoppiceError
from coppice.v1 import inference_pb2
from orchestrator.request.generation import Generation
from orchestrator.request.responses import Responses


@dataclass(frozen=True)
class OneOutput:
    """An output and its message builder."""

    generation: Generation
    responses: Responses


class Outputs:
    """Runs a request's outputs while the context is entered; leaving it frees their resources.

    All share the event `wake`. With `first_alone` the others start after the first output's first token, when the
    prompt is in the verifier's prefix cache, so it is computed once.
    """

    def __init__(
        self,
        outputs: Sequence[OneOutput],
        wake: asyncio.Event,
        *,
        first_alone: bool,
    ) -> None:
        self._outputs = tuple(outputs)
        # Called when all have ended, delivered or not.
        self.on_ended: Callable[[], None] = lambda: None
        for output in self._outputs:
            output.generation.on_ended = self._output_ended
        self._is_paused = False
        # Messages taken so far, and whether one is waiting to be taken.
        self._num_taken = 0
        self._is_offered = False
        self._wake = wake
        self._waiting = list(self._outputs[1:]) if first_alone else []
        self._running = contextlib.ExitStack()

    def __enter__(self) -> Outputs:
        with contextlib.ExitStack() as stack:
            for output in self._begun:
                stack.enter_context(output.generation)
            self._running = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()

    @property
    def generations(self) -> tuple[Generation, ...]:
        """Generations of all outputs, started or not."""
        return tuple(output.generation for output in self._outputs)

    @property
    def num_generated(self) -> int:
        """Tokens of the longest output so far."""
        return max(output.generation.num_generated for output in self._outputs)

    @property
    def num_generated_in_all(self) -> int:
        """Tokens of all outputs so far."""
        return sum(output.generation.num_generated for output in self._outputs)

    @property
    def offered(self) -> int | None:
        """Index of the message waiting to be taken; None if none is."""
        return self._num_taken if self._is_offered else None

    def pause(self) -> None:
        """Close all sequences at the verifier; pending text is delivered, and no more comes until `resume`."""
        self._is_paused = True
        for output in self._begun:
            output.generation.pause()

    def resume(self) -> None:
        """Resume every output that has started and has not ended."""
        self._is_paused = False
        for output in self._begun:
            output.generation.resume()
        self._wake.set()

    async def messages(self) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Messages of all outputs as they come, until all have ended.

        Raises:
            CoppiceError: an output failed; its earlier messages have been delivered.
        """
        unfinished = list(self._outputs)
        while unfinished:
            await self._wake.wait()
            self._wake.clear()
            self._begin_waiting()
            for output in tuple(unfinished):
                generation, responses = output.generation, output.responses
                if generation.finish is not None:
                    unfinished.remove(output)
                    self._is_offered = True
                    yield responses.last(generation, generation.finish)
                    self._taken()
                    continue
                if (delta := generation.take()) and (message := responses.delta(delta)) is not None:
                    self._is_offered = True
                    yield message
                    self._taken()
                if generation.error is not None:
                    raise generation.error

    def fail(self, error: CoppiceError) -> None:
        """Fail every output that has not ended; none starts any more."""
        self._waiting = []
        for output in self._outputs:
            output.generation.fail(error)

    @property
    def _begun(self) -> tuple[OneOutput, ...]:
        return self._outputs[: len(self._outputs) - len(self._waiting)]

    def _taken(self) -> None:
        self._is_offered = False
        self._num_taken += 1

    def _output_ended(self) -> None:
        if all(output.generation.has_ended for output in self._outputs):
            self.on_ended()

    def _begin_waiting(self) -> None:
        first = self._outputs[0].generation
        # The first may finish without a token: a grammar may only allow the empty text.
        if self._waiting and not self._is_paused and (first.num_generated or first.finish is not None):
            waiting, self._waiting = self._waiting, []
            for output in waiting:
                self._running.enter_context(output.generation)
