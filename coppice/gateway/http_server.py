"""The HTTP server: uvicorn with bounds on heads, on slow requests and on clients that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from coppice.core.errors import UnavailableError
from coppice.gateway.config import GatewayConfig
from coppice.net.certificates import Certificates
from coppice.net.server_contexts import ServerContexts

# Of a request's line and headers. Bodies have their own bound, which depends on the route.
MAX_HEAD_BYTES = 64 * 1024
# Between requests of one connection; above what clients and proxies keep theirs for.
IDLE_S = 75
START_TIMEOUT_S = 10.0
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GuardedHttp(HttpToolsProtocol):
    """A connection that ends when a request takes long to arrive, has a large head, or its answer is not read."""

    # Seconds for a request to arrive, and for a client to read.
    receive_s: ClassVar[float]
    unread_s: ClassVar[float]

    _arrival: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _is_arriving = True
    _head_bytes = 0
    _in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._arrival, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_arriving or self.transport.is_closing():
            return
        # A request that comes in one piece needs no timer.
        if self._arrival is None:
            self._await_request()
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.write(_TOO_LARGE)
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_arriving, self._in_head, self._head_bytes = True, True, 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        if sum([len(name) + len(value) for name, value in self.headers]) > MAX_HEAD_BYTES:
            raise ValueError("the head is too large")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_arriving = False
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def _await_request(self) -> None:
        self._arrival = self.loop.call_later(self.receive_s, self.transport.abort)


@contextlib.asynccontextmanager
async def serving(app: Any, config: GatewayConfig, certificates: Certificates | None) -> AsyncIterator[str]:
    """Serve an ASGI application while the context is open; closing drains it. Gives HOST:PORT.

    Raises:
        UnavailableError: the address is taken or not local.
    """
    listener = _listener(config.listen_address)
    settings = uvicorn.Config(
        app,
        http=type("BoundedHttp", (GuardedHttp,), {"receive_s": config.receive_s, "unread_s": config.unread_s}),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        # uvicorn refuses at the number, not above it.
        limit_concurrency=config.max_connections + 1,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=round(config.grace_s),
    )
    if certificates is not None:
        settings.load()
        settings.ssl = _context(certificates)
    # It would tell of every request that is not HTTP; what the application raises is told by its endpoints.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    server = _Server(settings)
    running = asyncio.create_task(server.serve(sockets=[listener]), name="http server")
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not server.started and not running.done():  # noqa: ASYNC110  uvicorn has no event for it
                await asyncio.sleep(0.005)
        host = config.listen_address.rpartition(":")[0]
        yield f"{host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await running


def _listener(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        [(family, *_), *_] = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        return socket.create_server((host, int(port)), family=family, backlog=1024)
    except OSError as error:
        raise UnavailableError(f"cannot listen at {address}: {error}") from error


def _context(certificates: Certificates) -> ssl.SSLContext:
    """Context of the certificates that are current at each handshake."""
    contexts = ServerContexts(certificates, asks_client=False, protocols=["http/1.1"])
    context = contexts.current()

    def renew(connection: ssl.SSLObject | ssl.SSLSocket, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = contexts.current()

    context.sni_callback = renew
    return context
