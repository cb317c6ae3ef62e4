"""Calls of one client's connection: held until their first message is complete, then forwarded to the server."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from coppice.net import frames
from coppice.net.frames import CANCEL, HEAD, REFUSED_STREAM
from coppice.net.guard.limits import GuardLimits, Room
from coppice.net.guard.pending import PendingCalls
from coppice.net.guard.streams import HttpStream

logger = logging.getLogger(__name__)

# Messages above this are large: at most this much of a call is held, and the rest needs room shared by large messages.
LARGE_BYTES = 32768
# Minimum rate of a large message, which extends its deadline.
_SLOWEST_BYTES_PER_S = 65536
# Clients with a smaller receive window get no call forwarded.
_MIN_WINDOW_BYTES = 1024


class _QueuedData(NamedTuple):
    """A DATA frame of a forwarded call that waits for the server's window; `was_held` until the call was forwarded."""

    flags: int
    payload: bytes
    was_held: bool


class Calls:
    """Calls have their own stream ids towards the server, assigned when they are forwarded.

    `peer` is the client's `host:port`; `to_client` and `to_server` write to the ends.
    """

    def __init__(
        self,
        peer: str,
        limits: GuardLimits,
        room: Room,
        pending: PendingCalls,
        to_client: Callable[[bytes], None],
        to_server: Callable[[bytes], None],
    ) -> None:
        self.peer = peer
        self.to_client = to_client
        self.to_server = to_server
        self._limits = limits
        self._room = room
        self._pending = pending
        self._loop = asyncio.get_running_loop()
        # Highest stream id opened by the client.
        self.last_stream = 0
        self._next_upstream = 1
        # Streams by the client's id; and the client's ids by the server's.
        self.streams: dict[int, HttpStream] = {}
        self.by_upstream: dict[int, int] = {}
        # Calls without a complete first message, in order of opening.
        self.incomplete: dict[int, HttpStream] = {}
        # Bytes of DATA that the server takes on this connection. Window of held bytes is returned to the client before
        # the server has it, so the client's own window does not bound what is forwarded.
        self._server_window = frames.DEFAULT_WINDOW_BYTES
        # DATA that waits for it, by the client's id; the calls take turns.
        self._queued: dict[int, deque[_QueuedData]] = {}
        # Bytes of window that the guard has granted and the server will grant again.
        self._granted = 0

    def hold(self, number: int, stream: HttpStream, flags: int, payload: bytes, out: list[bytes]) -> None:
        """Keep a DATA frame until the call is forwarded; frames for the server are added to `out`."""
        stream.hold(flags, payload)
        # Return the window, so that held bytes do not block other calls of the connection.
        self.give_back(len(payload))
        self._room.hold(self, len(payload))
        if number in self.streams:
            self.release_if_ready(number, stream, out)

    def release_if_ready(self, number: int, stream: HttpStream, out: list[bytes]) -> None:
        """Forward a call if its first message is complete, or large and with room."""
        if stream.window < _MIN_WINDOW_BYTES:
            return
        size = stream.messages.size
        is_complete = stream.messages.num_complete > 0 or stream.client_ended
        # gRPC refuses an oversized message by its length.
        is_refused = size > stream.messages.max_bytes
        if not is_complete:
            if size <= LARGE_BYTES and not is_refused:
                return
            if not is_refused and not self._reserve(stream, size):
                return
        if is_complete or is_refused:
            self.incomplete.pop(number, None)
        self.release(number, stream, out)

    def release(self, number: int, stream: HttpStream, out: list[bytes]) -> None:
        """Forward a call: its headers, and the DATA held as far as the server's window goes."""
        stream.upstream, self._next_upstream = self._next_upstream, self._next_upstream + 2
        self.by_upstream[stream.upstream] = number
        self._pending.passed(self.peer, stream.upstream)
        ends_at_once = stream.client_ended and not stream.frames
        out.append(frames.header_frames(stream.upstream, stream.headers or [], ends_stream=ends_at_once))
        out.append(frames.window_update(stream.upstream, stream.credit))
        held, stream.headers, stream.frames = stream.frames, None, []
        for flags, payload in held:
            self._send(number, stream, _QueuedData(flags, payload, was_held=True), out)

    def pass_data(self, number: int, stream: HttpStream, flags: int, payload: bytes, out: list[bytes]) -> None:
        """Forward a DATA frame of a forwarded call, as soon as the server's window permits."""
        self._send(number, stream, _QueuedData(flags, payload, was_held=False), out)

    def grant(self, num_bytes: int) -> int:
        """Take a WINDOW_UPDATE of the server's connection; returns the bytes that the client has not been granted."""
        self._server_window += num_bytes
        out: list[bytes] = []
        while self._queued:
            number = next(iter(self._queued))
            queue, stream = self._queued.pop(number), self.streams[number]
            if len(queue[0].payload) > self._server_window:
                self._queued = {number: queue, **self._queued}
                break
            self._write(stream, queue.popleft(), out)
            if queue:
                self._queued[number] = queue
        self.to_server(b"".join(out))
        known = min(num_bytes, self._granted)
        self._granted -= known
        return num_bytes - known

    def _send(self, number: int, stream: HttpStream, data: _QueuedData, out: list[bytes]) -> None:
        # An empty frame needs no window, but may not overtake its call's other frames.
        is_blocked = self._queued if data.payload else number in self._queued
        if is_blocked or len(data.payload) > self._server_window:
            self._queued.setdefault(number, deque()).append(data)
        else:
            self._write(stream, data, out)

    def _write(self, stream: HttpStream, data: _QueuedData, out: list[bytes]) -> None:
        size = len(data.payload)
        out.append(HEAD.pack(size << 8, data.flags, stream.upstream))
        out.append(data.payload)
        self._server_window -= size
        if data.was_held:
            self._granted += size
            stream.num_held -= size
            self._room.hold(self, -size)

    def free(self, stream: HttpStream) -> None:
        """Free the room of a call's large message."""
        self._room.give_back(self, stream.reserved)
        stream.reserved = 0

    def end(self, number: int, code: int) -> None:
        """End a call on both sides."""
        stream = self.streams[number]
        self.to_client(frames.reset(number, code))
        if stream.upstream:
            self.to_server(frames.reset(stream.upstream, CANCEL))
        self.forget(number)

    def forget(self, number: int) -> None:
        """Remove a call that has ended."""
        stream = self.streams.pop(number)
        self.incomplete.pop(number, None)
        self.by_upstream.pop(stream.upstream, None)
        if (unsent := self._queued.pop(number, None)) is not None:
            self.give_back(sum(len(data.payload) for data in unsent if not data.was_held))
            # The server may have answered before it had all, and would wait for the rest.
            self.to_server(frames.reset(stream.upstream, CANCEL))
        self._pending.ended(self.peer, stream.upstream)
        self._room.hold(self, -stream.num_held)
        self.free(stream)

    def forget_all(self) -> None:
        """Remove all calls: the connection has ended."""
        for stream in self.streams.values():
            self._pending.ended(self.peer, stream.upstream)
            self.free(stream)
            self._room.hold(self, -stream.num_held)
        self.streams, self.by_upstream, self.incomplete, self._queued = {}, {}, {}, {}

    def give_back(self, num_bytes: int) -> None:
        """Return window for bytes that the server never sees."""
        if num_bytes:
            self.to_client(frames.window_update(0, num_bytes))

    def expire(self, now_s: float) -> None:
        """End calls whose first message is late."""
        late = [number for number, stream in self.incomplete.items() if now_s > stream.deadline_s]
        for number in late:
            self.end(number, CANCEL)
        if late:
            logger.info("%d calls of %s ended: no complete message in time", len(late), self.peer)

    def end_slow_message(self, since_s: float) -> bool:
        """End the longest pending call with a large message, if it began before `since_s`."""
        for number, stream in self.incomplete.items():
            if stream.reserved and stream.opened_s < since_s:
                logger.info("a call of %s ended: its message is slow and others need the room", self.peer)
                self.end(number, CANCEL)
                return True
        return False

    def end_held_call(self) -> bool:
        """End the latest held call: too much is held in total, and most by this connection. False if it has none."""
        number = next((number for number, stream in reversed(self.streams.items()) if stream.num_held), None)
        if number is None:
            return False
        logger.info("a call of %s is refused: too many bytes of incomplete messages are held", self.peer)
        self.end(number, REFUSED_STREAM)
        return True

    def room_is_free(self) -> None:
        """Retry messages that found no room."""
        self._loop.call_soon(self._release_waiting)

    def _release_waiting(self) -> None:
        """Retry the held calls."""
        out: list[bytes] = []
        for number, stream in list(self.incomplete.items()):
            if not stream.upstream:
                self.release_if_ready(number, stream, out)
        self.to_server(b"".join(out))

    def _reserve(self, stream: HttpStream, size: int) -> bool:
        now_s = self._loop.time()
        if not self._room.take(self, size, now_s):
            return False
        stream.reserved = size
        stream.deadline_s = now_s + self._limits.first_message_s + size / _SLOWEST_BYTES_PER_S
        return True
