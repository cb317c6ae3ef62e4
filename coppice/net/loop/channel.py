"""A channel on the event loop: it connects when it is called, and again after a loss."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc

from coppice.net.certificates import Certificates, Pems
from coppice.net.frames import Headers
from coppice.net.loop.call import PREFIX_BYTES, LoopCall
from coppice.net.loop.connection import LoopConnection
from coppice.net.turns import Turns

logger = logging.getLogger(__name__)

Message = TypeVar("Message")

# To connect to each address of a name, TLS and the server's greeting included.
CONNECT_S = 2.0
# For the addresses of a name: less than quick calls take (`QUICK_TIMEOUT_S` in `coppice/gateway/upstream.py`).
RESOLVE_S = 4.0
# Of a call, and how long it then waits, more after each.
_MOST_REFUSALS = 5
_AGAIN_S = 0.01
# Numbers in grpc-timeout have at most eight digits.
_MOST_DIGITS = 99_999_999


class LoopChannel:
    """Calls of one server; close it. Plaintext without certificates, which are the current ones of each connection."""

    def __init__(
        self,
        address: str,
        certificates: Certificates | None = None,
        silence_s: float = 30.0,
        answer_s: float = 10.0,
    ) -> None:
        """After `silence_s` without a word the server is asked for one, and lost after `answer_s` more."""
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._address = address
        self._certificates = certificates
        self._times = (silence_s, answer_s)
        self._connection: LoopConnection | None = None
        # With those whose servers take no more calls, while the last ones run.
        self._connections: set[LoopConnection] = set()
        self._connecting: asyncio.Task[None] | None = None
        self._resolving: asyncio.Future[list[Any]] | None = None
        # The certificates that the context was made of.
        self._pems: Pems | None = None
        self._tls: ssl.SSLContext | None = None
        self._waiting: Turns[LoopCall[Any]] = Turns()
        self._is_closed = False

    def call(
        self,
        path: str,
        request: bytes,
        parse: Callable[[bytes], Message],
        metadata: Sequence[tuple[str, str]] = (),
        timeout_s: float = math.inf,
        shared: bytes = b"",
        client: str = "",
        connection: str = "",
    ) -> LoopCall[Message]:
        """Begin a call of a method with one request; it is sent once there is a connection with room.

        `metadata` is printable ASCII; `parse` reads a message. `shared` is the request's first part, which calls may
        have in common. Clients take turns by their name, and then a client's connections.
        """
        named = [(name.encode(), value.encode()) for name, value in metadata]
        prefix = b"\0" + (len(shared) + len(request)).to_bytes(PREFIX_BYTES - 1, "big")
        call = LoopCall(self._headers(path, timeout_s) + named, (prefix, shared, request), parse, client, connection)
        if timeout_s < math.inf:
            call.deadline = asyncio.get_running_loop().call_later(timeout_s, _expire, call)
        self._begin(call)
        return call

    @property
    def is_connected(self) -> bool:
        """Whether calls can be sent over a connection that is there."""
        return self._connection is not None and self._connection.is_open

    def connect(self) -> None:
        """Begin to connect, unless that is under way."""
        if self._connecting is None and not self._is_closed:
            self._connecting = asyncio.create_task(self._connect(), name="connecting")

    async def close(self) -> None:
        """Close the connections and fail their calls."""
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        if self._resolving is not None:
            self._resolving.cancel()
        for connection in tuple(self._connections):
            connection.close()
        self._go_on()

    def _headers(self, path: str, timeout_s: float) -> Headers:
        name = self._certificates.server_name if self._certificates is not None else ""
        headers = [
            (b":method", b"POST"),
            (b":scheme", b"http" if self._certificates is None else b"https"),
            (b":path", path.encode()),
            (b":authority", (name or self._address).encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", b"coppice"),
        ]
        if timeout_s < math.inf:
            headers.append((b"grpc-timeout", _timeout(timeout_s)))
        return headers

    def _go_on(self) -> None:
        """Send waiting calls, or connect for them."""
        if not self.is_connected:
            self._connection = None
        self._connections = {one for one in self._connections if not one.is_lost}
        if self._is_closed:
            self._fail_waiting("the channel is closed")
        if not self._waiting:
            return
        if self._connection is None:
            self.connect()
            return
        while (call := self._waiting.take(self._connection.may_begin)) is not None:
            self._connection.begin(call)

    def _again(self, call: LoopCall[Any], reason: str) -> None:
        """Send a call again that a server has not looked at, after a moment: it may count some that have ended."""
        call.num_refusals += 1
        if call.num_refusals > _MOST_REFUSALS:
            call.fail(grpc.StatusCode.UNAVAILABLE, reason)
        else:
            asyncio.get_running_loop().call_later(_AGAIN_S * call.num_refusals, self._begin, call)

    def _begin(self, call: LoopCall[Any]) -> None:
        if not call.has_ended:
            self._waiting.add(call, call.client, call.connection)
            # Until it is taken.
            call.on_cancel = lambda: self._waiting.remove(call, call.client, call.connection)
            self._go_on()

    async def _connect(self) -> None:
        error: Exception | None = None
        try:
            self._connection = await self._connected()
            self._connections.add(self._connection)
        except (OSError, UnicodeError) as reason:  # the latter from a host that cannot be a name
            error = reason
        finally:
            self._connecting = None
        if error is not None:
            self._fail_waiting(f"no connection to {self._address}: {error}")
        self._go_on()

    async def _connected(self) -> LoopConnection:
        """A connection to the first address of the name that answers.

        Raises:
            OSError: none of them does in time.
        """
        error = OSError("the name has no address")
        for *_, place in await self._resolved():
            try:
                async with asyncio.timeout(CONNECT_S):
                    return await self._connected_to(str(place[0]), int(place[1]))
            except OSError as reason:
                error = reason
        raise error

    async def _resolved(self) -> list[Any]:
        """Addresses that the system finds for the name. It may take half a minute: the next connection joins the wait.

        Raises:
            OSError: it finds nothing, or not in time.
        """
        resolving = self._resolving
        if resolving is None:
            found = asyncio.get_running_loop().getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            resolving = self._resolving = asyncio.ensure_future(found)
            resolving.add_done_callback(self._end_resolving)
        await asyncio.wait({resolving}, timeout=RESOLVE_S)
        if not resolving.done():
            raise OSError("the name is not resolved in time")
        return resolving.result()

    def _end_resolving(self, resolving: asyncio.Future[list[Any]]) -> None:
        self._resolving = None
        if not resolving.cancelled():
            # Nobody may wait for it any more.
            resolving.exception()

    async def _connected_to(self, host: str, port: int) -> LoopConnection:
        context, name = self._context()
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: LoopConnection(self._go_on, self._again, *self._times),
            host,
            port,
            ssl=context,
            server_hostname=name,
        )
        try:
            await connection.greeted()
        except BaseException:
            connection.close()
            raise
        return connection

    def _context(self) -> tuple[ssl.SSLContext | None, str | None]:
        """Context of the current certificates, and the name that the server's has to have.

        Raises:
            OSError: there is no context yet, and the files are not those that were checked.
        """
        if self._certificates is None:
            return None, None
        pems = self._certificates.current()
        if pems is not self._pems:
            try:
                self._tls, self._pems = self._made(pems), pems
            except OSError as error:  # changed again in between: tried again by the next connection
                if self._tls is None:
                    raise
                logger.warning("the old certificate stays in use: %s", error)
        return self._tls, self._certificates.server_name or self._host

    def _made(self, pems: Pems) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=None if pems.ca is None else pems.ca.decode())
        context.set_alpn_protocols(["h2"])
        if pems.cert is not None and self._certificates is not None:
            # `ssl` only takes a pair from files; they were checked before.
            files = self._certificates.tls
            context.load_cert_chain(files.cert, files.key, password="")
        return context

    def _fail_waiting(self, reason: str) -> None:
        for call in self._waiting.take_all():
            call.fail(grpc.StatusCode.UNAVAILABLE, reason)


def _expire(call: LoopCall[Any]) -> None:
    call.on_cancel()
    call.fail(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


def _timeout(seconds: float) -> bytes:
    """Value of grpc-timeout."""
    ms = math.ceil(max(seconds, 0.001) * 1000)
    return b"%dm" % ms if ms <= _MOST_DIGITS else b"%dS" % min(math.ceil(seconds), _MOST_DIGITS)
