"""One HTTP exchange over ASGI: bodies within their bound, JSON answers, events of a stream, clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from coppice.gateway.errors import ApiError

COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
# Of the event loop, until the end of a connection is seen that came with the request.
_TURNS = 4
# Key of `HttpExchange.becomes` in the state of a scope.
BECOMES = "becomes"
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies that buffer answers are asked not to.
    "x-accel-buffering": "no",
}


class ClientGoneError(Exception):
    """The client has closed its connection: there is none to answer."""


class HttpExchange:
    """A request and the way to answer it. `headers_sent` go with every answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = Headers(scope=scope)
        # IP address of the client; empty if the server does not know it.
        self.client: str = (scope.get("client") or ("",))[0]
        # Its connection, by IP address and port.
        self.connection = "{}:{}".format(*(scope.get("client") or ("", 0)))
        # By the server: takes note of the calls that the request becomes.
        self.becomes: Callable[[int], object] = scope.get("state", {}).get(BECOMES, _nothing)
        self.headers_sent: dict[str, str] = {}
        # Of the answer, once it has begun.
        self.status: int | None = None
        self._receive = receive
        self._send = send
        self._last_s = asyncio.get_running_loop().time()

    def body_bytes(self, max_bytes: int) -> int:
        """Bytes of the body as declared, or `max_bytes`; it has to be declared as JSON.

        A web page cannot send JSON elsewhere without being allowed to.

        Raises:
            ApiError: it is too large, or declared as something else.
        """
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "the header Content-Type must be application/json", code="unsupported_media_type")
        coding = self.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            text = "the body must not be compressed: leave out the header Content-Encoding"
            raise ApiError(415, text, code="unsupported_media_type")
        declared = self.headers.get("content-length", "")
        size = int(declared[:20]) if declared.isdecimal() else max_bytes
        if size > max_bytes:
            raise _too_large(max_bytes)
        return size

    async def body(self, max_bytes: int) -> bytes:
        """The body.

        Raises:
            ApiError: it is too large.
            ClientGoneError: the client has left.
        """
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientGoneError
            part = message.get("body", b"")
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def stays(self) -> None:
        """Let the end of a connection come that was closed with its request; for after the body.

        Raises:
            ClientGoneError: the client has left.
        """
        left = asyncio.create_task(self._left(), name="client")
        try:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            if left.done():
                raise ClientGoneError
        finally:
            left.cancel()

    @contextlib.asynccontextmanager
    async def watched(self, leave: Callable[[], None]) -> AsyncIterator[None]:
        """Call `leave` when the client leaves while the context is open, and end it with ClientGoneError.

        `leave` cancels calls, which then raise CancelledError here.
        """
        left = asyncio.create_task(self._left(), name="client")
        left.add_done_callback(lambda task: None if task.cancelled() else leave())
        try:
            yield
        except asyncio.CancelledError:
            if left.done() and not left.cancelled():
                raise ClientGoneError from None
            raise
        finally:
            left.cancel()

    async def answer(self, status: int, content: Any, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole answer as JSON."""
        body = _json(content)
        length = {"content-type": "application/json", "content-length": str(len(body))}
        await self._begin(status, length | dict(headers or {}))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def refuse(self, error: ApiError) -> None:
        """Send an error: as the answer, or as the last event of a stream that has begun."""
        if self.status is None:
            # What is left of a body that is too large is not read.
            closing = {"connection": "close"} if error.status == 413 else {}
            await self.answer(error.status, error.body(), error.headers() | closing)
            return
        await self.event(error.body())
        await self.end()

    async def event(self, content: Any) -> None:
        """Send an event of a stream."""
        await self._chunk(b"data: %b\n\n" % _json(content))

    async def end(self) -> None:
        """End a stream."""
        await self._chunk(DONE, more=False)

    @contextlib.asynccontextmanager
    async def kept_alive(self, silence_s: float) -> AsyncIterator[None]:
        """Send a comment after each silence of this length while the context is open."""
        keeping = asyncio.create_task(self._keep_alive(silence_s), name="keep-alive")
        try:
            yield
        finally:
            keeping.cancel()

    async def _keep_alive(self, silence_s: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            left_s = self._last_s + silence_s - loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                await self._chunk(COMMENT)

    async def _chunk(self, data: bytes, more: bool = True) -> None:
        if self.status is None:
            await self._begin(200, _STREAM_HEADERS)
        self._last_s = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        raw = [(name.encode(), value.encode("latin-1")) for name, value in (self.headers_sent | dict(headers)).items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def _nothing(num_calls: int) -> None:
    pass


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body has more than {max_bytes} bytes", code="request_too_large")


def _json(content: Any) -> bytes:
    """JSON of plain values, in UTF-8. A number that JSON does not have is null."""
    return to_json(content, inf_nan_mode="null")
