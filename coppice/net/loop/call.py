"""A call over a loop channel: its messages at the pace of its reader, and its end."""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar
from urllib.parse import unquote_to_bytes

import grpc
from google.protobuf.message import DecodeError

from coppice.net.frames import Headers

Message = TypeVar("Message")

# Flag of compression and length of a message.
PREFIX_BYTES = 5
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# Bytes that may wait for the reader before the server has to.
UNREAD_BYTES = 32 * 1024
# Of servers and proxies without gRPC (https://github.com/grpc/grpc/blob/master/doc/http-grpc-status-mapping.md).
_OF_HTTP = {
    b"400": grpc.StatusCode.INTERNAL,
    b"401": grpc.StatusCode.UNAUTHENTICATED,
    b"403": grpc.StatusCode.PERMISSION_DENIED,
    b"404": grpc.StatusCode.UNIMPLEMENTED,
    **dict.fromkeys((b"429", b"502", b"503", b"504"), grpc.StatusCode.UNAVAILABLE),
}
_CODES = {b"%d" % code.value[0]: code for code in grpc.StatusCode}


class LoopCall(Generic[Message]):
    """A call with one request; iterate over it for the messages. Its end is told after them.

    Raises while iterated over:
        grpc.aio.AioRpcError: the call has failed.
        asyncio.CancelledError: it was cancelled here.
    """

    def __init__(
        self,
        headers: Headers,
        request: Sequence[bytes],
        parse: Callable[[bytes], Message],
        client: str = "",
        connection: str = "",
    ) -> None:
        """Made by a channel; `request` is in parts, and `parse` reads a message and raises ValueError.

        `client` and `connection` name the client whose turn it takes, and that client's connection.
        """
        self.headers = headers
        self.client = client
        self.connection = connection
        # Kept until the server has answered: it may be sent again.
        self._request = request
        # By servers that say that they have not looked at it.
        self.num_refusals = 0
        # What is not sent yet, and how much the server takes.
        self.unsent = memoryview(b"")
        self.window = 0
        # Bytes of window that the server gets back once there is room.
        self.owed = 0
        # By the channel: when the call is cancelled, and when there is room again.
        self.on_cancel: Callable[[], object] = lambda: None
        self.on_room: Callable[[], object] = lambda: None
        self.deadline: asyncio.TimerHandle | None = None
        self._parse = parse
        self._partial = bytearray()
        self._messages: deque[bytes] = deque()
        self._num_unread = 0
        self._end: BaseException | None = None
        self._news: asyncio.Future[None] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether no more messages come."""
        return self._end is not None

    @property
    def has_room(self) -> bool:
        """Whether the server may send more."""
        return self._num_unread < UNREAD_BYTES

    def begin(self, window: int) -> None:
        """Join the parts of the request, for a server that takes `window` bytes of it."""
        self.unsent, self.window = memoryview(b"".join(self._request)), window

    def __aiter__(self) -> LoopCall[Message]:
        """The messages."""
        return self

    async def __anext__(self) -> Message:
        """The next message."""
        while not self._messages:
            if self._end is not None:
                raise self._end
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        data = self._messages.popleft()
        had_room = self.has_room
        self._num_unread -= len(data)
        if self.has_room and not had_room:
            self.on_room()
        try:
            return self._parse(data)
        except (DecodeError, ValueError):
            self.cancel()
            raise _failure(grpc.StatusCode.INTERNAL, "a message that cannot be read") from None

    def cancel(self) -> None:
        """End the call; messages that were not read are dropped. Without effect after its end."""
        if self._end is not None:
            return
        self.on_cancel()
        self._messages.clear()
        self._ended(asyncio.CancelledError())

    def receive(self, data: bytes) -> None:
        """Add bytes of messages."""
        self._request = ()
        partial = self._partial
        partial += data
        while len(partial) >= PREFIX_BYTES:
            size = int.from_bytes(partial[1:PREFIX_BYTES], "big")
            if partial[0] or size > MAX_MESSAGE_BYTES:
                self.on_cancel()
                self.fail(grpc.StatusCode.INTERNAL, "a message that is compressed, or too large")
                return
            if len(partial) < PREFIX_BYTES + size:
                return
            self._messages.append(bytes(partial[PREFIX_BYTES : PREFIX_BYTES + size]))
            self._num_unread += size
            del partial[: PREFIX_BYTES + size]
            self._wake()

    def finish(self, trailers: Headers) -> None:
        """End the call with the server's status."""
        pairs = [(name.decode(errors="replace"), value) for name, value in trailers]
        fields = dict(pairs)
        code = _code(fields)
        if code == grpc.StatusCode.OK:
            self._ended(StopAsyncIteration())
            return
        details = unquote_to_bytes(fields.get("grpc-message", b"")).decode(errors="replace")
        self.fail(code, details, grpc.aio.Metadata(*((name, _value(name, value)) for name, value in pairs)))

    def fail(self, code: grpc.StatusCode, details: str, trailers: grpc.aio.Metadata | None = None) -> None:
        """End the call with an error."""
        self._ended(_failure(code, details, trailers))

    def _ended(self, end: BaseException) -> None:
        if self._end is not None:
            return
        self._end = end
        self._request, self.unsent = (), memoryview(b"")
        if self.deadline is not None:
            self.deadline.cancel()
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


def _failure(code: grpc.StatusCode, details: str, trailers: grpc.aio.Metadata | None = None) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata() if trailers is None else trailers
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)


def _code(fields: dict[str, bytes]) -> grpc.StatusCode:
    """The status of a call; without one, that of its HTTP status."""
    text = fields.get("grpc-status")
    if text is None:
        return _OF_HTTP.get(fields.get(":status", b""), grpc.StatusCode.UNKNOWN)
    return _CODES.get(text, grpc.StatusCode.UNKNOWN)


def _value(name: str, value: bytes) -> str | bytes:
    """A value of metadata; those of names in -bin are bytes, in base 64 and often without its padding.

    Empty where it is no base 64.
    """
    if name.endswith("-bin"):
        try:
            return base64.b64decode(value + b"=" * (-len(value) % 4))
        except ValueError:
            return b""
    return value.decode(errors="replace")
