"""Client side of in-memory calls: a channel on which generated stubs work as on gRPC's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, NoReturn

import grpc

from coppice.colocated.exchange import CANCELLED, Exchange, Metadata, PipeOverError
from coppice.colocated.server import STOPPED, InMemoryServer
from coppice.core.errors import UnsupportedError
from coppice.net.certificates import Certificates


class InMemoryNetwork:
    """Servers of this process by name."""

    def __init__(self) -> None:
        self._servers: dict[str, InMemoryServer] = {}

    def serve(self, name: str, server: InMemoryServer) -> None:
        """Register the server for a name."""
        self._servers[name] = server

    def dial(self, name: str, certificates: Certificates | None = None) -> grpc.aio.Channel:
        """A channel to a name. In-process calls need no certificates."""
        return InMemoryChannel(partial(self._servers.get, name))


class InMemoryChannel(grpc.aio.Channel):
    """Messages are passed by reference, not serialised. A call goes to the server registered when it begins.

    Methods are unary or bidirectional streams.
    """

    def __init__(self, find: Callable[[], InMemoryServer | None]) -> None:
        self._find = find
        self._calls: set[Exchange] = set()

    async def __aenter__(self) -> InMemoryChannel:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Cancel running calls."""
        for exchange in self._calls:
            exchange.abandon(CANCELLED)
        self._calls.clear()

    def unary_unary(self, method: str, *serializers: object, **options: object) -> Any:
        """A unary method."""
        return partial(self._unary, method)

    def stream_stream(self, method: str, *serializers: object, **options: object) -> Any:
        """A bidirectional streaming method."""
        return partial(self._stream, method)

    def _not_offered(self, *arguments: Any, **options: Any) -> Any:
        raise UnsupportedError("in-memory channels only have unary and bidirectional streaming methods")

    # Parts of gRPC's interface that we do not use.
    get_state = wait_for_state_change = channel_ready = unary_stream = stream_unary = _not_offered

    def _begin(self, method: str, timeout: float | None, metadata: Metadata | None) -> Exchange:
        # Drop finished calls.
        self._calls = {exchange for exchange in self._calls if exchange.status is None}
        exchange = Exchange(timeout, tuple(metadata or ()))
        self._calls.add(exchange)
        if (server := self._find()) is None:
            exchange.finish(STOPPED)
        else:
            server.begin(method, exchange)
        return exchange

    async def _unary(
        self,
        method: str,
        request: Any,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - stubs call it so
        metadata: Metadata | None = None,
    ) -> Any:
        exchange = self._begin(method, timeout, metadata)
        try:
            await exchange.requests.put(request)
            return await exchange.responses.get()
        except PipeOverError:
            _raise(exchange)
        finally:
            # Cancels the call of a caller that gave up; no effect on a finished one.
            exchange.abandon(CANCELLED)

    def _stream(self, method: str, *, timeout: float | None = None, metadata: Metadata | None = None) -> StreamCall:
        return StreamCall(self._begin(method, timeout, metadata))


class StreamCall:
    """The part of `grpc.aio.StreamStreamCall` that our clients use, with its errors."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def wait_for_connection(self) -> None:
        """Wait until messages reach the server."""
        self._check()

    async def write(self, message: Any) -> None:
        """Send a message."""
        try:
            await self._exchange.requests.put(message)
        except PipeOverError:
            _raise(self._exchange)

    def cancel(self) -> bool:
        """Cancel the call, unless it has ended."""
        return self._exchange.abandon(CANCELLED)

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._exchange.status is not None

    async def __aiter__(self) -> AsyncIterator[Any]:
        """The server's messages, until it ends the call."""
        while True:
            try:
                message = await self._exchange.responses.get()
            except PipeOverError:
                self._check()
                return
            yield message

    def _check(self) -> None:
        if self._exchange.status is not None and self._exchange.status.code is not grpc.StatusCode.OK:
            _raise(self._exchange)


def _raise(exchange: Exchange) -> NoReturn:
    """Raise gRPC's error for a call that has ended."""
    status = exchange.status
    if status is CANCELLED:
        raise asyncio.CancelledError
    if status is None or status.code is grpc.StatusCode.OK:
        raise asyncio.InvalidStateError("the call is over")
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    raise grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, status.details)
