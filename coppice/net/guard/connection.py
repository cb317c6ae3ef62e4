"""One client's connection and its connection to the server: opened, paused and closed together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from coppice.net import frames
from coppice.net.frames import HEAD_BYTES, PREFACE, SETTINGS, ProtocolError
from coppice.net.guard.calls import Calls
from coppice.net.guard.client_frames import ClientFrames
from coppice.net.guard.limits import GuardLimits, Room
from coppice.net.guard.server_frames import ServerFrames
from coppice.net.guard.turnstile import HostAccount, Turnstile

logger = logging.getLogger(__name__)

# Cost of a connection, in units of work (turnstile.py).
START_UNITS = 3.0
# Seconds to flush sent data when an end is closed.
_FLUSH_S = 5.0
# Place of a frame's type.
_KIND_AT = 3


class End(asyncio.Protocol):
    """Protocol of one end, with functions of the connection as callbacks."""

    def __init__(
        self,
        data: Callable[[bytes], None],
        lost: Callable[[], None],
        writable: Callable[[bool], None],
        made: Callable[[asyncio.Transport], None],
    ) -> None:
        self._data = data
        self._lost = lost
        self._writable = writable
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._made(cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        self._data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._lost()

    def pause_writing(self) -> None:
        """Called by asyncio."""
        self._writable(False)

    def resume_writing(self) -> None:
        """Called by asyncio."""
        self._writable(True)


class Connection:
    """Both ends of one client's connection.

    `peer` is the client's `host:port`. `ready` is called after its preface, `gone` at its end (the ends may still be
    closing). `dial` connects to the server, or returns None.
    """

    def __init__(
        self,
        peer: str,
        limits: GuardLimits,
        room: Room,
        turnstile: Turnstile,
        dial: Callable[[asyncio.Protocol], asyncio.Task[asyncio.Transport | None]],
        ready: Callable[[Connection], None],
        gone: Callable[[Connection], None],
    ) -> None:
        self._limits = limits
        self._turnstile = turnstile
        self._dial = dial
        self._ready = ready
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self.opened_s = self._loop.time()
        self.peer = peer
        self.account: HostAccount = turnstile.open(peer.rpartition(":")[0], self._go_on)
        self.client_end = End(self._from_client, self._client_lost, self._client_writable, self._client_made)
        self._client: asyncio.Transport | None = None
        self._server: asyncio.Transport | None = None
        self._dialing: asyncio.Task[asyncio.Transport | None] | None = None
        # Bytes received and not consumed yet.
        self._inbound, self._outbound = bytearray(), bytearray()
        # What is to be sent after the server's first frame; None once that was sent.
        self._early: bytearray | None = bytearray()
        # Reasons for not reading from the client.
        self._pauses: set[str] = set()
        self.has_preface = False
        self.is_closed = False
        # Set while neither end is open.
        self._ends_lost = asyncio.Event()
        self._num_ends = 0
        self._calls = Calls(peer, limits, room, turnstile.pending, self._to_client, self._to_server)
        self._client_frames = ClientFrames(self._calls, limits, turnstile, self.account)
        self._server_frames = ServerFrames(self._calls)

    @property
    def num_streams(self) -> int:
        """Open calls."""
        return len(self._calls.streams)

    def expire(self, now_s: float) -> None:
        """End late calls, or a connection without a preface; called about once a second."""
        if not self.has_preface:
            if now_s - self.opened_s > self._limits.preface_s:
                self.abort()
        else:
            self._calls.expire(now_s)

    def abort(self) -> None:
        """Close both ends at once."""
        for end in (self._client, self._server):
            if end is not None:
                end.abort()
        self._closed()

    def close(self, code: int = frames.NO_ERROR) -> None:
        """Send GOAWAY to the client, and close both ends."""
        if self._client is not None and not self.is_closed:
            self._greet()
            self._client.write(frames.goaway(self._calls.last_stream, code))
            self._hang_up(self._client)
        if self._server is not None:
            self._server.abort()
        self._closed()

    @property
    def has_ended(self) -> bool:
        """Whether both ends are closed."""
        return self.is_closed and not self._num_ends

    async def ended(self) -> None:
        """Wait until both ends are closed."""
        if self._num_ends:
            await self._ends_lost.wait()

    def _hang_up(self, end: asyncio.Transport) -> None:
        """Close an end; data not flushed in time is lost."""
        if end.is_closing():
            # A TLS transport closed twice can no longer be aborted.
            return
        end.close()
        self._loop.call_later(_FLUSH_S, self.abort)

    def _count_ends(self, change: int) -> None:
        self._num_ends += change
        if self._num_ends:
            self._ends_lost.clear()
        else:
            self._ends_lost.set()

    # The client's end.

    def _client_made(self, transport: asyncio.Transport) -> None:
        self._client = transport
        self._count_ends(1)
        if self.is_closed:
            transport.abort()

    def _client_lost(self) -> None:
        # A transport that has been flushed and closed cannot be aborted.
        self._client = None
        self._count_ends(-1)
        if self._server is not None:
            self._hang_up(self._server)
        self._closed()

    def _client_writable(self, is_writable: bool) -> None:
        if self._server is not None:
            if is_writable:
                self._server.resume_reading()
            else:
                self._server.pause_reading()

    def _from_client(self, data: bytes) -> None:
        if self.is_closed:
            return
        self._inbound += data
        if not self._pauses:
            self._read_client()

    def _pause(self, reason: str) -> None:
        if not self._pauses and self._client is not None:
            self._client.pause_reading()
        self._pauses.add(reason)

    def _unpause(self, reason: str) -> None:
        self._pauses.discard(reason)
        if self._pauses or self.is_closed:
            return
        self._read_client()
        if not self._pauses and not self.is_closed and self._client is not None:
            self._client.resume_reading()

    def _go_on(self) -> None:
        self._unpause("turn")

    def _read_client(self) -> None:
        """Consume complete frames received, as far as the connection's budget goes."""
        try:
            if not self.has_preface:
                self._read_preface()
            elif not self._client_frames.read(self._inbound):
                self._pause("turn")
        except ProtocolError as error:
            logger.info("closing the connection of %s: %s", self.peer, error)
            self.close(error.code)

    def _read_preface(self) -> None:
        if len(self._inbound) < len(PREFACE):
            if not PREFACE.startswith(self._inbound):
                raise ProtocolError("no HTTP/2 preface")
            return
        if not self._inbound.startswith(PREFACE):
            raise ProtocolError("no HTTP/2 preface")
        if len(self._inbound) < len(PREFACE) + HEAD_BYTES:
            return
        if self._inbound[len(PREFACE) + _KIND_AT] != SETTINGS:
            raise ProtocolError("the first frame is not SETTINGS")
        if not self._turnstile.take(self.account, START_UNITS):
            self._pause("turn")
            return
        self.has_preface = True
        del self._inbound[: len(PREFACE)]
        self._ready(self)
        if self.is_closed:
            return
        self._dialing = self._dial(End(self._from_server, self._server_lost, self._server_writable, self._server_made))
        self._dialing.add_done_callback(self._connected)
        self._pause("server")

    def _connected(self, dialing: asyncio.Task[asyncio.Transport | None]) -> None:
        server = None if dialing.cancelled() else dialing.result()
        if self.is_closed or server is None:
            if server is not None:
                server.abort()
            self.close()
            return
        self._server = server
        server.write(PREFACE)
        self._unpause("server")

    # The server's end.

    def _server_made(self, transport: asyncio.Transport) -> None:
        self._count_ends(1)

    def _server_lost(self) -> None:
        self._server = None
        self._count_ends(-1)
        if self._client is not None:
            self._greet()
            self._hang_up(self._client)
        self._closed()

    def _server_writable(self, is_writable: bool) -> None:
        if is_writable:
            self._unpause("server")
        else:
            self._pause("server")

    def _from_server(self, data: bytes) -> None:
        if self.is_closed:
            return
        self._outbound += data
        self._server_frames.read(self._outbound)

    # Both.

    def _to_client(self, data: bytes) -> None:
        if not data or self._client is None or self.is_closed:
            return
        if self._early is not None:
            # SETTINGS are the first frame (RFC 9113, section 3.4), and they are the server's: until then what this side
            # has to say of frames that came with the client's preface waits.
            if data[_KIND_AT] != SETTINGS:
                self._early += data
                return
            data, self._early = data + self._early, None
        self._client.write(data)

    def _greet(self) -> None:
        """Send what waits for the server's first frame: there will be none."""
        if self._early:
            self._to_client(frames.settings([]))

    def _to_server(self, data: bytes) -> None:
        if data and self._server is not None:
            self._server.write(data)

    def _closed(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._turnstile.close(self.account)
        self._calls.forget_all()
        self._inbound, self._outbound = bytearray(), bytearray()
        self._gone(self)
