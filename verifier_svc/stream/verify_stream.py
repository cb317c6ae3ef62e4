"""One orchestrator's stream of VerifierService: messages become commands, events become messages."""

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
from verifier_svc.stream.events import Event, is_last
from verifier_svc.stream.request_parser import RequestParser
from verifier_svc.stream.responses import responses

# Bounds memory if an orchestrator stops reading.
MAX_UNREAD = 4096


class VerifyStream:
    """Sequences of one orchestrator. All methods run on the event loop.

    Events are written within the callback that delivers them: rounds wait for them.
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
        self._parser = RequestParser(engine, info, stream, self.deliver)
        self._loop = asyncio.get_running_loop()
        # Done once nothing can be written any more; an exception is reported to the peer.
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._writer = MessageWriter(write, lambda: self._end(None))

    async def converse(self, requests: AsyncIterator[verifier_pb2.VerifyRequest]) -> None:
        """Serve the stream until the peer half-closes and is answered, or disconnects.

        Raises:
            InvalidRequestError: the peer does not read responses.
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
            self._parser.take(request)

    def _deliver_soon(self, events: Sequence[Event]) -> None:
        """Hand events to the loop; called on the engine's thread."""
        # At shutdown the loop closes before the engine; no stream is open then.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.deliver, list(events))

    def deliver(self, events: Sequence[Event]) -> None:
        """Send events to the peer."""
        for event in events:
            if is_last(event):
                self._parser.ended(event.sequence_id)
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
