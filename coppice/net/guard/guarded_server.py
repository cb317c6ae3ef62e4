"""gRPC server on a Unix socket in a private directory, reachable only through its guard, which clients connect to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import ssl
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import grpc

from coppice.core.errors import UnavailableError
from coppice.net.guard.connection import Connection
from coppice.net.guard.limits import GuardLimits, Room
from coppice.net.guard.pending import PendingCalls
from coppice.net.guard.turnstile import DEFAULT_RATES, Rates, Turnstile
from coppice.net.listening import accept, begin, listen

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_SWEEP_S = 1.0
_CLOSE_S = 0.5
# Ended connections that may still send what they have; of more, the oldest are aborted. With TLS each holds buffers.
_MOST_CLOSING = 32
_LAST_TURNS = 3
# Seconds before a handshake may be evicted by another one of its host.
_LEAST_HANDSHAKE_S = 0.5


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
        self._listeners = listen(address)
        self._turnstile = Turnstile(self._rates, self._pending)
        for listener in self._listeners:
            self._start(accept(listener, self._takes))
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

    def _takes(self, client: socket.socket, host: str, port: int) -> bool:
        if not self._has_place(host):
            return False
        connection = Connection(
            f"{host}:{port}", self._limits, self._room, self._turnstile, self._dial, self._is_ready, self._is_gone
        )
        self._handshakes[connection] = self._start(self._begin(client, connection))
        return True

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
        context = None if self._context is None else self._context()
        if not await begin(client, lambda: connection.client_end, context):
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


# Unix socket paths have at most 107 bytes; the file name needs some of them.
_LONGEST_DIRECTORY = 80


class GuardedServer:
    """Starts a server and its guard, and stops them in order."""

    def __init__(
        self,
        server: grpc.aio.Server,
        limits: GuardLimits,
        context: Callable[[], ssl.SSLContext] | None = None,
        pending: PendingCalls | None = None,
    ) -> None:
        self.grpc = server
        self._limits = limits
        self._context = context
        self._pending = pending
        self._directory: Path | None = None
        self._guard: Guard | None = None

    async def start(self, address: str) -> int:
        """Serve at `host:port`; returns the port.

        Raises:
            UnavailableError: the address is taken or not local, or the socket cannot be created.
        """
        parent = tempfile.gettempdir()
        try:
            # Only accessible to this user.
            self._directory = Path(
                tempfile.mkdtemp(prefix="coppice-", dir=parent if len(parent) <= _LONGEST_DIRECTORY else "/tmp")
            )
        except OSError as error:
            raise UnavailableError(f"no place for a socket in {parent}: {error.strerror}") from error
        path = str(self._directory / "grpc")
        guard = Guard(path, self._limits, self._context, pending=self._pending)
        try:
            self.grpc.add_insecure_port(f"unix:{path}")
            await self.grpc.start()
            port = guard.listen(address)
        except (UnavailableError, RuntimeError) as error:
            await self.grpc.stop(None)
            self._remove_directory()
            raise error if isinstance(error, UnavailableError) else UnavailableError(str(error)) from error
        self._guard = guard
        return port

    async def stop(self, grace_s: float | None) -> None:
        """Accept no more connections, let calls finish for `grace_s` seconds, then end them."""
        if self._guard is not None:
            self._guard.stop_listening()
        await self.grpc.stop(grace_s)
        if self._guard is not None:
            await self._guard.stop()
        self._remove_directory()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
