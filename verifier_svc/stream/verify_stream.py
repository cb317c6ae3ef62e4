"""One orchestrator's stream of VerifierService: its messages go through the door, events become messages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from coppice.core.errors import CoppiceError, InvalidRequestError
from coppice.net.message_writer import MessageWriter
from coppice.net.stream_observer import StreamObserver
from coppice.v1 import verifier_pb2
from verifier_svc.engine.engine import Engine
from verifier_svc.model.target_model import TargetInfo
from verifier_svc.stream.events import Event
from verifier_svc.stream.request_parser import RequestParser
from verifier_svc.stream.responses import responses

# An orchestrator that has stopped reading must not fill our memory.
MAX_UNREAD = 4096


class VerifyStream:
    """The sequences of one peer. All methods run on the event loop.

    The engine's events are written within the callback that brings them: a round waits for them.
    """

    def __init__(
        self,
        engine: Engine,
        info: TargetInfo,
        stream: int,
        write: Callable[[verifier_pb2.VerifyResponse], Awaitable[None]],
        observers: Sequence[StreamObserver] = (),
    ) -> None:
        self._engine = engine
        self._observers = observers
        self._stream = stream
        self._door = RequestParser(engine, info, stream, self.deliver)
        self._loop = asyncio.get_running_loop()
        # Done when nothing can be written any more; an exception is the peer's fault.
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._writer = MessageWriter(write, lambda: self._end(None))

    async def converse(self, requests: AsyncIterator[verifier_pb2.VerifyRequest]) -> None:
        """Serve the peer until it has nothing more to say and is answered, or goes away.

        Raises:
            InvalidRequestError: the peer does not read what it is told.
        """
        self._engine.attach(self._stream, self._deliver_soon)
        reader = asyncio.create_task(self._read(requests))
        try:
            await asyncio.wait({reader, self._over}, return_when=asyncio.FIRST_COMPLETED)
            if self._over.done():
                self._over.result()
                return
            await reader
            await self._writer.flush()
        finally:
            self._engine.detach(self._stream)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader
            await self._writer.close()
            for observer in self._observers:
                observer.over()

    async def _read(self, requests: AsyncIterator[verifier_pb2.VerifyRequest]) -> None:
        """Turn messages into commands."""
        async for request in requests:
            for observer in self._observers:
                observer.heard(request)
            self._door.take(request)

    def _deliver_soon(self, events: Sequence[Event]) -> None:
        """From the engine's thread, which goes on with the batch."""
        # The loop closes before the engine when the process stops; nobody is left to read then.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.deliver, list(events))

    def deliver(self, events: Sequence[Event]) -> None:
        """Tell the peer of events."""
        for event in events:
            for response in responses(event):
                self._writer.send(response)
                for observer in self._observers:
                    observer.told(response)
        if self._writer.num_waiting > MAX_UNREAD:
            self._end(InvalidRequestError("stream", "responses are not being read"))

    def _end(self, error: CoppiceError | None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)
