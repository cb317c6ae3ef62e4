"""The HTTP server: uvicorn with bounds on connections, heads, slow requests and clients that do not read.

Work is scheduled fairly among hosts, as the gRPC services' guard does it: a client that has used its share is not read
from for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

import httptools
import uvicorn
from pydantic_core import to_json
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from coppice.gateway.config import GatewayConfig
from coppice.gateway.errors import ApiError
from coppice.gateway.exchange import BECOMES
from coppice.net.certificates import Certificates
from coppice.net.guard.turnstile import Turnstile
from coppice.net.listening import accept, begin, listen
from coppice.net.server_contexts import ServerContexts

logger = logging.getLogger(__name__)

# Of a request's line and headers. Bodies have their own bound, which depends on the route.
MAX_HEAD_BYTES = 64 * 1024
# Between requests of one connection; above what clients and proxies keep theirs for.
IDLE_S = 75
START_TIMEOUT_S = 10.0
# Requests of one connection before the first of them is answered.
MAX_PIPELINED = 16
# Bytes parsed at a time, and what they cost at least and by size, in units of the turnstile.
_READ_BYTES = 4 * 1024
_LEAST_UNITS = 3.0
_BYTES_PER_UNIT = 1024
# What a request with a body costs besides, and each further call that it becomes: those wait for their turns later, and
# a high price would hold up all that is read from its host.
_CALL_UNITS = 5.0
_MORE_UNITS = 1.0
# A host may have this share of the connections; uvicorn's own bound counts aborted ones, too.
_HOST_SHARE = 0.75
_ABORTED = 256
# Before an idle connection may be closed for another one of its host: a flood of them is refused, which costs less.
_LEAST_IDLE_S = 0.5
MAX_HANDSHAKES = 256
_TOO_LARGE = ApiError(431, f"the head of the request has more than {MAX_HEAD_BYTES} bytes", code="request_too_large")


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class OpenConnections:
    """Connections by host, at most `most`. Where there are too many, the oldest idle one makes room for a newcomer.

    It is one of the host with most connections, or of the newcomer's own if that has its share. The newcomer is
    refused where all of them serve requests.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._hosts: dict[GuardedHttp, str] = {}
        self._counts: Counter[str] = Counter()

    def has_place(self, host: str) -> bool:
        """Whether a host may have one more connection; closes another one for it if need be."""
        if self._counts[host] + 1 > _HOST_SHARE * self._most:
            crowd = host
        elif len(self._hosts) < self._most:
            return True
        else:
            crowd = max(self._counts, key=self._counts.__getitem__)
        own = (connection for connection, name in self._hosts.items() if name == crowd)
        oldest = next((connection for connection in own if connection.is_idle), None)
        if oldest is None or (crowd == host and oldest.age_s < _LEAST_IDLE_S):
            return False
        self.remove(oldest)
        oldest.transport.abort()
        return True

    def add(self, newcomer: GuardedHttp, host: str) -> None:
        """Count a connection."""
        self._hosts[newcomer] = host
        self._counts[host] += 1

    def remove(self, connection: GuardedHttp) -> None:
        """Count a connection no more."""
        if (host := self._hosts.pop(connection, None)) is not None:
            self._counts[host] -= 1
            if not self._counts[host]:
                del self._counts[host]


class _Flow(FlowControl):
    """Flow of a connection that is not read from while it is held, whatever uvicorn wants."""

    is_held = False

    def hold(self) -> None:
        """Stop reading."""
        self.is_held = True
        self.pause_reading()

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class GuardedHttp(HttpToolsProtocol):
    """A connection that ends when a request takes long to arrive, has a large head, or its answer is not read."""

    # Seconds for a request to arrive, and for a client to read.
    receive_s: ClassVar[float]
    unread_s: ClassVar[float]
    # Of all connections.
    open_connections: ClassVar[OpenConnections]
    turnstile: ClassVar[Turnstile]

    # Requests whose answers are not complete, oldest first; only the oldest is being answered. uvicorn remembers the
    # latest alone, and would go on answering the others of a client that has left.
    _open: deque[RequestResponseCycle]
    _arrival: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _is_arriving = True
    _head_bytes = 0
    _in_head = True
    # Head of a request that offers another protocol, without the offer.
    _upgrading: bytes | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow: _Flow = _Flow(transport)
        host = (transport.get_extra_info("peername") or ("",))[0]
        self._inbound = bytearray()
        self._open = deque()
        self._account = self.turnstile.open(host, self._go_on)
        self._opened_s = self.loop.time()
        self._await_request()
        self.open_connections.add(self, host)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._arrival, self._unread):
            if timer is not None:
                timer.cancel()
        self.open_connections.remove(self)
        self.turnstile.close(self._account)
        self._inbound.clear()
        self.pipeline.clear()
        for cycle in self._open:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """Whether no whole request waits for its answer."""
        return len(self._open) <= (self._is_arriving and not self._in_head)

    @property
    def age_s(self) -> float:
        """Seconds since it was opened."""
        return self.loop.time() - self._opened_s

    def data_received(self, data: bytes) -> None:
        is_first = not self._inbound
        self._inbound += data
        if is_first:
            self._go_on()

    def _go_on(self) -> None:
        """Read what has come, as far as its share goes; the turnstile calls this again."""
        while self._inbound and not self.transport.is_closing():
            part = bytes(self._inbound[:_READ_BYTES])
            if not self.turnstile.take(self._account, max(_LEAST_UNITS, len(part) / _BYTES_PER_UNIT)):
                self.flow.hold()
                return
            del self._inbound[: len(part)]
            self._read(part)
        if self.flow.is_held:
            self.flow.is_held = False
            # Else uvicorn goes on, once the application has read the body or answered.
            if not self.pipeline and (self.cycle is None or len(self.cycle.body) <= HIGH_WATER_LIMIT):
                self.flow.resume_reading()

    def _read(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if not self._is_arriving or self.transport.is_closing():
            return
        # A request that comes in one piece needs no timer.
        if self._arrival is None:
            self._await_request()
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.write(_whole_answer(_TOO_LARGE, b"Request Header Fields Too Large"))
                self.transport.close()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._upgrading is None:  # CONNECT
                return
            # The parser takes what follows for another protocol. A new one reads the same request without its offer.
            head, self._upgrading = self._upgrading, None
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._feed(head + data[upgrade.args[0] :])

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests before the first one's answer")
        super().on_message_begin()
        self._is_arriving, self._in_head, self._head_bytes = True, True, 0

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            # An offer that a server may ignore (RFC 9110 section 7.8); Java's client makes it in every request.
            line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
            kept = [(name, _without_upgrade(name, value)) for name, value in self.headers if name != b"upgrade"]
            self._upgrading = line + b"".join([b"%b: %b\r\n" % header for header in kept]) + b"\r\n"
            return
        self._in_head = False
        if sum([len(name) + len(value) for name, value in self.headers]) > MAX_HEAD_BYTES:
            raise ValueError("the head is too large")
        if self.parser.get_method() == b"POST":
            self.turnstile.charge(self._account, _CALL_UNITS)
            self.scope["state"][BECOMES] = self._becomes
        super().on_headers_complete()
        if self.cycle is not None and not self.cycle.response_complete:
            self._open.append(self.cycle)

    def _becomes(self, num_calls: int) -> None:
        """Charge the calls of a request besides its first."""
        self.turnstile.charge(self._account, (num_calls - 1) * _MORE_UNITS)

    def on_response_complete(self) -> None:
        self._open.popleft()
        super().on_response_complete()

    def on_message_complete(self) -> None:
        if self._upgrading is not None:
            return
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
    listeners = listen(config.listen_address)
    connections = OpenConnections(config.max_connections)
    bounds = {"receive_s": config.receive_s, "unread_s": config.unread_s}
    of_all = {"open_connections": connections, "turnstile": Turnstile()}
    settings = uvicorn.Config(
        app,
        http=type("BoundedHttp", (GuardedHttp,), bounds | of_all),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=config.max_connections + _ABORTED,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=round(config.grace_s),
    )
    settings.load()
    context = None if certificates is None else _context(certificates)
    # It would tell of every request that is not HTTP; what the application raises is told by its endpoints.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    server = _Server(settings)
    running = asyncio.create_task(server.serve(sockets=[]), name="http server")
    # TLS handshakes, oldest first.
    handshakes: dict[asyncio.Task[bool], None] = {}

    def protocol() -> asyncio.Protocol:
        kind: Any = settings.http_protocol_class
        made: asyncio.Protocol = kind(
            config=settings, server_state=server.server_state, app_state=server.lifespan.state
        )
        return made

    def takes(client: socket.socket, host: str, _: int) -> bool:
        if not connections.has_place(host):
            return False
        task = asyncio.create_task(begin(client, protocol, context), name="http handshake")
        handshakes[task] = None
        task.add_done_callback(lambda task: handshakes.pop(task, None))
        if len(handshakes) > MAX_HANDSHAKES:
            next(iter(handshakes)).cancel()
        return True

    # uvicorn would accept all that wait at once.
    accepting = [asyncio.create_task(accept(one, takes), name="http accept") for one in listeners]
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not server.started and not running.done():  # noqa: ASYNC110  uvicorn has no event for it
                await asyncio.sleep(0.005)
        host = config.listen_address.rpartition(":")[0]
        yield f"{host}:{listeners[0].getsockname()[1]}"
    finally:
        for task in (*accepting, *handshakes):
            task.cancel()
        await asyncio.wait(accepting)
        for listener in listeners:
            listener.close()
        server.should_exit = True
        await running


def _whole_answer(error: ApiError, phrase: bytes) -> bytes:
    """An answer that ends its connection, for requests that do not reach the application."""
    body = to_json(error.body())
    head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (error.status, phrase, len(body)) + body


def _without_upgrade(name: bytes, value: bytes) -> bytes:
    """A header's value; of `Connection`, without the option `upgrade`."""
    if name != b"connection":
        return value
    return b", ".join(option for part in value.split(b",") if (option := part.strip()).lower() != b"upgrade")


def _context(certificates: Certificates) -> ssl.SSLContext:
    """Context of the certificates that are current at each handshake."""
    contexts = ServerContexts(certificates, asks_client=False, protocols=["http/1.1"])
    context = contexts.current()

    def renew(connection: ssl.SSLObject | ssl.SSLSocket, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = contexts.current()

    context.sni_callback = renew
    return context
