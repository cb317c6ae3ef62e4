"""The calling end of calls in memory: a channel on which generated stubs work as they do on gRPC's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, NoReturn

import grpc

from coppice.colocated.exchange import CANCELLED, Exchange, Metadata, PipeOverError
from coppice.colocated.server import STOPPED, InMemoryServer
from coppice.net.certificates import Certificates


class InMemoryNetwork:
    """Servers of this process, by name."""

    def __init__(self) -> None:
        self._servers: dict[str, InMemoryServer] = {}

    def serve(self, name: str, server: InMemoryServer) -> None:
        """Calls to a name go to this server from now on."""
        self._servers[name] = server

    def dial(self, name: str, certificates: Certificates | None = None) -> grpc.aio.Channel:
        """A channel to a name. Nobody listens in, so that certificates are of no use."""
        return InMemoryChannel(partial(self._servers.get, name))


class InMemoryChannel(grpc.aio.Channel):
    """Messages are handed over, and neither copied nor serialised. A call goes to the server of its time.

    Methods are unary, or stream both ways.
    """

    def __init__(self, find: Callable[[], InMemoryServer | None]) -> None:
        self._find = find
        self._calls: set[Exchange] = set()

    async def __aenter__(self) -> InMemoryChannel:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Cancel the calls that last."""
        for exchange in self._calls:
            exchange.abandon(CANCELLED)
        self._calls.clear()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Whether there is a server."""
        server = self._find()
        is_there = server is not None and server.is_serving
        return grpc.ChannelConnectivity.READY if is_there else grpc.ChannelConnectivity.TRANSIENT_FAILURE

    def unary_unary(self, method: str, *serializers: object, **options: object) -> Any:
        """A method of one message each way."""
        return partial(self._unary, method)

    def stream_stream(self, method: str, *serializers: object, **options: object) -> Any:
        """A method of many messages each way."""
        return partial(self._stream, method)

    def _not_offered(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(
            "a channel in memory has unary methods and streams both ways, and calls show its state"
        )

    # The rest of gRPC's interface, which nothing of ours uses.
    wait_for_state_change = channel_ready = unary_stream = stream_unary = _not_offered

    def _begin(self, method: str, timeout: float | None, metadata: Metadata | None) -> Exchange:
        # What has ended by now would otherwise stay.
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
            # Of a caller that waits no longer; else it has ended.
            exchange.abandon(CANCELLED)

    def _stream(self, method: str, *, timeout: float | None = None, metadata: Metadata | None = None) -> StreamCall:
        return StreamCall(self._begin(method, timeout, metadata))


class StreamCall:
    """What our clients use of `grpc.aio.StreamStreamCall`; it raises what that raises."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def wait_for_connection(self) -> None:
        """Return when messages reach the server."""
        self._check()

    async def write(self, message: Any) -> None:
        """Send a message."""
        try:
            await self._exchange.requests.put(message)
        except PipeOverError:
            _raise(self._exchange)

    async def done_writing(self) -> None:
        """Say that no message follows; the server may still answer."""
        self._exchange.requests.close()

    def cancel(self) -> bool:
        """End the call, unless it has ended."""
        return self._exchange.abandon(CANCELLED)

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._exchange.status is not None

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Messages of the server, until it has ended the call."""
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
    """What gRPC raises where a call has ended."""
    status = exchange.status
    if status is CANCELLED:
        raise asyncio.CancelledError
    if status is None or status.code is grpc.StatusCode.OK:
        raise asyncio.InvalidStateError("the call is over")
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    raise grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, status.details)
