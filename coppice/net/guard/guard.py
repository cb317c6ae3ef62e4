"""Listener for clients' connections to a gRPC server on a private Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

from coppice.core.errors import UnavailableError
from coppice.net.guard.connection import Connection
from coppice.net.guard.limits import GuardLimits, Room
from coppice.net.guard.pending import PendingCalls
from coppice.net.guard.turnstile import DEFAULT_RATES, Rates, Turnstile

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_BACKLOG = 512
_SWEEP_S = 1.0
_CLOSE_S = 0.5
# Ended connections that may still send what they have; of more, the oldest are aborted. With TLS each holds buffers.
_MOST_CLOSING = 32
_LAST_TURNS = 3
_HANDSHAKE_S = 10.0
# Seconds before a handshake may be evicted by another one of its host.
_LEAST_HANDSHAKE_S = 0.5
# Pause after a failure to accept, for example without file descriptors.
_RETRY_S = 0.05


class Guard:
    """Listens at an address and forwards calls to `upstream`, a Unix socket.

    `context` returns the TLS context for a new connection; without it connections are plaintext. The server reports to
    `pending` the calls it starts.
    """

    def __init__(
        self,
        upstream: str,
        limits: GuardLimits,
        context: Callable[[], ssl.SSLContext] | None = None,
        rates: Rates = DEFAULT_RATES,
        pending: PendingCalls | None = None,
    ) -> None:
        self._upstream = upstream
        self._limits = limits
        self._context = context
        self._rates = rates
        self._pending = pending
        self._room = Room(limits)
        # In order of arrival: connections without a preface yet, and the others.
        self._handshakes: dict[Connection, asyncio.Task[None]] = {}
        self._connections: dict[Connection, None] = {}
        # Ended connections with an end still open, oldest first.
        self._closing: dict[Connection, None] = {}
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def listen(self, address: str) -> int:
        """Bind to `host:port`, and begin to accept; returns the port.

        Raises:
            UnavailableError: the address is taken or not local.
        """
        try:
            self._listeners = _bound(address)
        except OSError as error:
            raise UnavailableError(f"cannot listen at {address}: {error.strerror or error}") from error
        self._turnstile = Turnstile(self._rates, self._pending)
        for listener in self._listeners:
            self._start(self._accept(listener))
        self._start(self._sweep())
        port: int = self._listeners[0].getsockname()[1]
        return port

    def stop_listening(self) -> None:
        """Accept no more connections; open ones continue."""
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener.fileno())
            listener.close()
        self._listeners = []

    async def stop(self) -> None:
        """End all connections."""
        self.stop_listening()
        for task in self._tasks:
            task.cancel()
        for connection in (*self._handshakes, *self._connections):
            connection.close()
        if self._tasks:
            await asyncio.wait(self._tasks)
        # Flush the last writes, as far as clients read them.
        await self._until_closed()
        for connection in self._closing:
            connection.abort()
        await self._until_closed()
        # The loop closes aborted handshakes in its next iterations.
        for _ in range(_LAST_TURNS):
            await asyncio.sleep(0)

    async def _until_closed(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                for connection in list(self._closing):
                    await connection.ended()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, address = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno == errno.EBADF:
                    return  # closed
                logger.warning("accepting a connection failed: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            if not self._has_place(address[0]):
                client.close()
                await asyncio.sleep(0)
                continue
            connection = Connection(
                f"{address[0]}:{address[1]}",
                self._limits,
                self._room,
                self._turnstile,
                self._dial,
                self._is_ready,
                self._is_gone,
            )
            self._handshakes[connection] = self._start(self._begin(client, connection))
            # Yield: a flood of connects must not monopolise the loop.
            await asyncio.sleep(0)

    def _has_place(self, host: str) -> bool:
        """Whether a host may begin a handshake; at the limit, the oldest one of the host with most is evicted.

        A regular handshake takes a moment, so old ones may be evicted. A host that floods handshakes gets no more,
        which is cheaper than starting and evicting them.
        """
        if len(self._handshakes) < self._limits.max_handshakes:
            return True
        oldest = _oldest_idle(self._handshakes)
        if oldest is None:
            return True
        is_young = asyncio.get_running_loop().time() - oldest.opened_s < _LEAST_HANDSHAKE_S
        if is_young and oldest.account.host == host:
            return False
        self._break_off(oldest)
        return True

    def _break_off(self, connection: Connection) -> None:
        """Close a connection without a preface, during or after its TLS handshake."""
        self._handshakes.pop(connection).cancel()
        connection.abort()

    async def _begin(self, client: socket.socket, connection: Connection) -> None:
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            context = None if self._context is None else self._context()
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection.client_end,
                client,
                ssl=context,
                ssl_handshake_timeout=None if context is None else _HANDSHAKE_S,
            )
        except (OSError, asyncio.CancelledError) as error:
            # A failed handshake is the client's error, and TLS has told it.
            logger.info("a connection failed to start: %s", error or "its handshake was evicted")
            client.close()
            connection.abort()

    def _dial(self, end: asyncio.Protocol) -> asyncio.Task[asyncio.Transport | None]:
        return self._start(self._connect(end))

    async def _connect(self, end: asyncio.Protocol) -> asyncio.Transport | None:
        try:
            transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: end, self._upstream)
        except OSError as error:
            logger.warning("the guarded server is not reachable: %s", error)
            return None
        return transport

    def _is_ready(self, connection: Connection) -> None:
        self._handshakes.pop(connection, None)
        if len(self._connections) >= self._limits.max_connections:
            self._make_room(connection)
        if not connection.is_closed:
            self._connections[connection] = None

    def _make_room(self, newcomer: Connection) -> None:
        """Close the oldest idle connection of the host with most; the newcomer if there is none."""
        (_oldest_idle(self._connections) or newcomer).close()

    def _is_gone(self, connection: Connection) -> None:
        self._handshakes.pop(connection, None)
        self._connections.pop(connection, None)
        self._closing[connection] = None
        if len(self._closing) > _MOST_CLOSING:
            self._forget_ended()
        for oldest in list(self._closing)[:-_MOST_CLOSING]:
            del self._closing[oldest]
            oldest.abort()

    def _forget_ended(self) -> None:
        self._closing = {connection: None for connection in self._closing if not connection.has_ended}

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            now_s = asyncio.get_running_loop().time()
            for connection in (*self._handshakes, *self._connections):
                connection.expire(now_s)
            self._forget_ended()

    def _start(self, coroutine: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _oldest_idle(connections: Collection[Connection]) -> Connection | None:
    """First connection without calls, of the host with most connections; None if all of its connections have calls."""
    hosts = Counter(connection.account.host for connection in connections)
    crowd, _ = hosts.most_common(1)[0]
    own = (connection for connection in connections if connection.account.host == crowd)
    return next((connection for connection in own if not connection.num_streams), None)


def _bound(address: str) -> list[socket.socket]:
    """Listening sockets for `host:port`: one per address of the host, all on one port.

    Raises:
        OSError: one cannot be bound.
    """
    host, _, text = address.rpartition(":")
    host, port = host.strip("[]"), int(text)
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for family, kind, protocol, _, place in dict.fromkeys(found):
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            # Allows reusing the port of a server that has just ended, not of a running one.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # As gRPC does: the IPv6 wildcard address also accepts IPv4.
                only_6 = not ipaddress.ip_address(str(place[0]).partition("%")[0]).is_unspecified
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_6)
            listener.bind((place[0], port, *place[2:]))
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            port = listener.getsockname()[1]
            listeners.append(listener)
        stack.pop_all()
    return listeners
