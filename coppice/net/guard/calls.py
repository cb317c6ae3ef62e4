"""Calls of one client's connection: held until their first message is complete, then forwarded to the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from coppice.net import frames
from coppice.net.frames import CANCEL, DATA, REFUSED_STREAM
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
        # Bytes of window that the guard has granted and the server will grant again.
        self.granted = 0

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
        """Forward a call: its headers and the DATA held."""
        stream.upstream, self._next_upstream = self._next_upstream, self._next_upstream + 2
        self.by_upstream[stream.upstream] = number
        self._pending.passed(self.peer, stream.upstream)
        ends_at_once = stream.client_ended and not stream.frames
        out.append(frames.header_frames(stream.upstream, stream.headers or [], ends_stream=ends_at_once))
        out += [frames.frame(DATA, flags, stream.upstream, payload) for flags, payload in stream.frames]
        out.append(frames.window_update(stream.upstream, stream.credit))
        self.granted += stream.num_held
        self._room.hold(self, -stream.num_held)
        stream.headers, stream.frames, stream.num_held = None, [], 0

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
        self._pending.ended(self.peer, stream.upstream)
        self._room.hold(self, -stream.num_held)
        self.free(stream)

    def forget_all(self) -> None:
        """Remove all calls: the connection has ended."""
        for stream in self.streams.values():
            self._pending.ended(self.peer, stream.upstream)
            self.free(stream)
            self._room.hold(self, -stream.num_held)
        self.streams, self.by_upstream, self.incomplete = {}, {}, {}

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
