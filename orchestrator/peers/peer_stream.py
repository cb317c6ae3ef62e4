"""Long-lived bidirectional stream to a peer, reconnected when lost."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import grpc

from coppice.core.errors import CoppiceError
from coppice.net.message_writer import MessageWriter
from coppice.net.stream_observer import StreamObserver
from coppice.wire.unreadable import UnreadablePeerError, received

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")
ResponseIn = TypeVar("ResponseIn", contravariant=True)

BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 1.0
# The channel's own backoff must not exceed the stream's, nor the time that requests wait.
CHANNEL_BACKOFF_MAX_MS = 1000
# Characters of a peer's own words in logs.
MOST_WORDS = 300
# Unsent messages at which a peer counts as stuck.
MAX_UNSENT = 8192
# Bytes of an opening that lets other sequences' messages pass.
LARGE_BYTES = 4096


class StreamEvents(Protocol[ResponseIn]):
    """Callbacks of a stream, from the event loop and never concurrent."""

    async def handshake(self) -> None:
        """Check the peer before the stream is opened; a CoppiceError refuses it."""

    def on_up(self) -> None:
        """The stream is open: messages may be sent."""

    def on_message(self, message: ResponseIn) -> None: ...

    def on_down(self) -> None:
        """The stream is lost, and the peer's state with it."""


class PeerStream(Generic[Request, Response]):
    """Keeps one stream open. A sequence's messages are sent in order, without blocking the caller.

    A large opening takes the peer's guard a while, so that other sequences' messages pass those that wait.
    """

    def __init__(
        self,
        name: str,
        open_call: Callable[[], grpc.aio.StreamStreamCall[Request, Response]],
        events: StreamEvents[Response],
    ) -> None:
        self._name = name
        self._open_call = open_call
        self._events = events
        # None while disconnected.
        self._writer: MessageWriter[Request] | None = None
        self._call: grpc.aio.StreamStreamCall[Request, Response] | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        # Set by recorders only.
        self.observer: StreamObserver | None = None
        # Reason of the last failed attempt; None after a success.
        self.last_failure: str | None = None
        # Set while the peer is refused.
        self.refusal: CoppiceError | None = None
        self.num_attempts = 0
        # Streams lost while open.
        self.num_lost = 0

    @property
    def connected(self) -> bool:
        """Whether messages reach the peer."""
        return self._writer is not None

    def start(self) -> None:
        """Connect, and reconnect until `stop`."""
        self._task = asyncio.create_task(self._run(), name=f"stream to {self._name}")

    async def stop(self) -> None:
        """Close the stream and stop reconnecting."""
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def drop(self) -> None:
        """Cancel the open stream, if any, and reconnect."""
        if self._call is not None:
            self._call.cancel()

    async def settled(self, *, patient: bool) -> None:
        """Wait until it is connected or refused or, unless `patient`, the first attempt has failed."""
        while not (self.connected or self.refusal or (self.num_attempts and not patient)):
            await self.changed()

    async def changed(self) -> None:
        """Wait for the next change of `connected`, `refusal` or `num_attempts`."""
        await self._changed.wait()

    def send(self, message: Request, sequence_id: int, opening_bytes: int = 0) -> None:
        """Send a message; dropped while disconnected, since `on_up` starts from scratch.

        `opening_bytes` is the size of a sequence's first message.
        """
        if self._writer is None or self._call is None:
            return
        if self._writer.num_waiting >= MAX_UNSENT:
            logger.warning("%s does not read its messages, dropping its stream", self._name)
            self._call.cancel()
            return
        self._writer.send(message, sequence_id, is_large=opening_bytes > LARGE_BYTES)
        if self.observer is not None:
            self.observer.told(message)

    def withdraw(self, sequence_id: int) -> bool:
        """Drop a sequence's messages if its opening still waits to be sent: the peer does not know it."""
        return self._writer is not None and self._writer.withdraw(sequence_id)

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _run(self) -> None:
        delay_s = BACKOFF_MIN_S
        while not self._stopping:
            begun_s = asyncio.get_running_loop().time()
            reason, was_up = await self._attempt()
            if was_up or self.last_failure is None:
                logger.warning("no stream to %s (%s), retrying", self._name, reason)
            self.last_failure = reason
            self.num_attempts += 1
            self._announce()
            # A peer that ends its streams at once is called as rarely as one that is away.
            has_lasted = was_up and asyncio.get_running_loop().time() - begun_s >= BACKOFF_MAX_S
            delay_s = BACKOFF_MIN_S if has_lasted else min(delay_s * 2, BACKOFF_MAX_S)
            # Jitter keeps orchestrators from reconnecting in step.
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))

    async def _attempt(self) -> tuple[str, bool]:
        """One connection from start to end: the reason it ended, and whether it was up."""
        try:
            await self._events.handshake()
            self.refusal = None
            await self._converse()
        except grpc.aio.AioRpcError as error:
            self.refusal = None
            return f"{error.code().name}: {(error.details() or '')[:MOST_WORDS]}", self._end()
        except UnreadablePeerError:
            return "it sent an unreadable message", self._end()
        except CoppiceError as error:
            self.refusal = error
            return str(error), self._end()
        except asyncio.CancelledError:
            was_up = self._end()
            task = asyncio.current_task()
            # Cancelling the call raises here too; only a cancelled task may end the loop.
            if task is not None and task.cancelling():
                raise
            return "cancelled", was_up
        except Exception:
            # A bug must not stop reconnecting.
            logger.exception("the stream to %s broke", self._name)
            return "internal error", self._end()
        return "the peer ended the stream", self._end()

    def _end(self) -> bool:
        was_up, self._writer, self._call = self.connected, None, None
        if was_up:
            self.num_lost += not self._stopping
            self._announce()
            self._events.on_down()
        return was_up

    async def _converse(self) -> None:
        call = self._open_call()
        # A failed write cancels the call; the reader sees its status.
        writer: MessageWriter[Request] = MessageWriter(call.write, call.cancel)
        try:
            await call.wait_for_connection()
            self._call, self._writer, self.last_failure = call, writer, None
            self._announce()
            logger.info("stream to %s is open", self._name)
            self._events.on_up()
            responses: Any = call
            async for message in responses:
                received(message)
                if self.observer is not None:
                    self.observer.heard(message)
                self._events.on_message(message)
        finally:
            self._call = None
            call.cancel()
            await writer.close()
