"""One client's connection, and the connection to the server that belongs to it.

Every call has another number towards the server, where it appears when its first message is complete. Header blocks
from clients are read and written anew; those from the server pass as they are, without a dynamic table, so that one of
them may be left out. Flow control is between client and server, save for DATA that goes no further: its bytes are
granted again by the guard.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from hpack import Decoder
from hpack.exceptions import HPACKError

from coppice.net.guard import frames
from coppice.net.guard.frames import (
    ACK,
    CANCEL,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEAD,
    HEAD_BYTES,
    HEADERS,
    MAX_FRAME_BYTES,
    MAX_WINDOW_BYTES,
    NUMBER,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Headers,
    ProtocolError,
)
from coppice.net.guard.streams import HttpStream, Messages, MessageTooLargeError, content
from coppice.net.guard.turnstile import HostAccount, Turnstile

logger = logging.getLogger(__name__)

# The client's address, in each call's metadata: one value per connection.
PEER_KEY = "x-coppice-peer"
_PEER = PEER_KEY.encode()
# What gRPC decodes as UTF-8 in the task that takes calls.
_METHOD = re.compile(rb"/[!-~]{1,255}")
# What gRPC allows in metadata: it decodes all of it as text, save for values of keys that end in "-bin".
_NAME = re.compile(rb":?[0-9a-z_.-]+")
_TEXT = re.compile(rb"[ -~]*")
# Of methods that are not ours: health, reflection.
OTHER_MESSAGE_BYTES = 65536
OURS = b"/coppice."
# Units of work (turnstile.py), about 50 microseconds each, by kind of frame; a connection pays before a frame is read.
_UNITS = {HEADERS: 3.0, CONTINUATION: 1.0, SETTINGS: 0.5, PING: 0.3, RST_STREAM: 0.3, PRIORITY: 0.3, WINDOW_UPDATE: 0.1}
_EMPTY_UNITS = 0.3
_DATA_UNITS = 0.1
_OTHER_UNITS = 0.3
# Every frame's payload; DATA that belongs to no call; messages of a call that may have many.
_UNITS_PER_BYTE = {SETTINGS: 2e-3}
_OTHER_UNITS_PER_BYTE = 1 / 65536
_LOST_DATA_UNITS = 1.0
_MESSAGE_UNITS = 0.1
_FREE_MESSAGES = 4
# A byte of a large message (streams.py) of a call that may have many: the server converts it before it looks further.
_LARGE_BYTE_UNITS = 1 / 2048
# A header block's entries and bytes, which are known when it is decoded.
_ENTRY_UNITS = 0.05
_BYTE_UNITS = 0.002
START_UNITS = 3.0
# What of a header block is read at most, encoded and decoded; and the most metadata that a call may have, as HTTP/2
# counts it, with 32 bytes beside each entry's own.
_MAX_BLOCK_BYTES = 131072
MAX_METADATA_BYTES = 16384
_ENTRY_BYTES = 32
_INVALID_ARGUMENT, _RESOURCE_EXHAUSTED = 3, 8
# A message of more is large: so much of a call is held at most, and it needs room among all large ones.
LARGE_BYTES = 32768
# A large message may take longer to come in than others, at this many bytes a second; one that has taken so many
# seconds has to make room for others if there is none left.
_SLOWEST_BYTES_PER_S = 65536
_SLOW_S = 2.0
# A client that takes less before it grants more is not sent anything.
_MIN_WINDOW_BYTES = 1024
# How long the rest of what was sent may take when an end is closed.
_FLUSH_S = 5.0


@dataclass(frozen=True, slots=True)
class GuardLimits:
    """Bounds of the guard. Times are seconds."""

    # Largest message of our methods.
    max_message_bytes: int
    # Calls at once on one connection, held ones counted.
    max_streams: int
    # Paths of methods that are called long before the first message comes; a connection may have `max_streaming` such
    # calls at once. And of those that have one request message alone.
    streaming: frozenset[bytes] = frozenset()
    max_streaming: int = 32
    unary: frozenset[bytes] = frozenset()
    # Calls at once on one connection of other methods, health and reflection: they may last for ever.
    max_other: int = 8
    # Until the preface and SETTINGS; and until a call's first message is complete.
    preface_s: float = 10.0
    first_message_s: float = 10.0
    # All large first messages that come in at once, and those of one connection; one of any size finds room alone.
    max_large_bytes: int = 64 << 20
    max_large_bytes_of_one: int = 16 << 20
    # DATA of calls that are held, of all connections; beyond it, the connection that has most loses a call.
    max_held_bytes: int = 48 << 20
    # Connections at once, those that have shown a preface or not.
    max_connections: int = 1024
    max_handshakes: int = 256


class Room:
    """Bytes of large messages that are coming in, and those of calls that are held, over all connections."""

    def __init__(self, limits: GuardLimits) -> None:
        self._limits = limits
        self._used: dict[Connection, int] = {}
        # Connections with a message that found no room.
        self._waiting: dict[Connection, None] = {}
        self._held: Counter[Connection] = Counter()
        self._num_held = 0

    def hold(self, connection: Connection, num_bytes: int) -> None:
        """Count what a connection holds: more, or less."""
        self._held[connection] += num_bytes
        self._num_held += num_bytes
        if not self._held[connection]:
            del self._held[connection]
        while num_bytes > 0 and self._num_held > self._limits.max_held_bytes:
            most = max(self._held, key=self._held.__getitem__)
            if not most.end_held_call():
                break

    def take(self, connection: Connection, num_bytes: int, now_s: float) -> bool:
        """Whether there is room for another message; a connection that has none may take a slow one's of another's."""
        limits = self._limits
        own = self._used.get(connection, 0)
        total = sum(self._used.values())
        is_free = not own or own + num_bytes <= limits.max_large_bytes_of_one
        if is_free and total and total + num_bytes > limits.max_large_bytes:
            most = max(self._used, key=self._used.__getitem__)
            is_free = not own and most.end_slow_message(now_s - _SLOW_S)
        if is_free:
            self._used[connection] = self._used.get(connection, 0) + num_bytes
        else:
            self._waiting[connection] = None
        return is_free

    def give_back(self, connection: Connection, num_bytes: int) -> None:
        """A message is complete or given up."""
        if num_bytes:
            self._used[connection] -= num_bytes
            if not self._used[connection]:
                del self._used[connection]
            waiting, self._waiting = self._waiting, {}
            for other in waiting:
                other.room_is_free()


class End(asyncio.Protocol):
    """One end's callbacks, as functions of the connection."""

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
        """As asyncio calls it."""
        self._made(cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        """As asyncio calls it."""
        self._data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio calls it."""
        self._lost()

    def pause_writing(self) -> None:
        """As asyncio calls it."""
        self._writable(False)

    def resume_writing(self) -> None:
        """As asyncio calls it."""
        self._writable(True)


class Connection:
    """Both ends of one client's connection.

    `peer` is the client's `host:port`. `ready` is called when it has shown a preface, `gone` when it has ended; both
    ends may be open for a moment then.

    The server is reached by `dial`, which returns None when it is not there.
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
        self._room = room
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
        # Bytes that came and are not read yet.
        self._inbound, self._outbound = bytearray(), bytearray()
        # Why the client is not read from.
        self._pauses: set[str] = set()
        self.has_preface = False
        self.is_closed = False
        # Set while neither end is connected.
        self._ends_lost = asyncio.Event()
        self._num_ends = 0
        self._decoder = Decoder(_MAX_BLOCK_BYTES)
        # A header block that is not complete: its stream, flags and bytes so far.
        self._block: tuple[int, int, bytearray] | None = None
        # What the client's SETTINGS grant each new stream.
        self._window = frames.DEFAULT_WINDOW_BYTES
        self._last_stream = 0
        self._next_upstream = 1
        # By the client's number; and the client's numbers by the server's.
        self._streams: dict[int, HttpStream] = {}
        self._by_upstream: dict[int, int] = {}
        # Calls whose first message is not complete, in the order of their opening.
        self._incomplete: dict[int, HttpStream] = {}
        # Bytes that the guard has let the client send again, and that the server will let it send again, too.
        self._granted = 0

    @property
    def num_streams(self) -> int:
        """Calls that have not ended."""
        return len(self._streams)

    def expire(self, now_s: float) -> None:
        """End what has taken too long to begin: called about once a second."""
        if not self.has_preface:
            if now_s - self.opened_s > self._limits.preface_s:
                self.abort()
            return
        late = [number for number, stream in self._incomplete.items() if now_s > stream.deadline_s]
        for number in late:
            self._end(number, CANCEL)
        if late:
            logger.info("%d calls of %s ended: no whole message in time", len(late), self.peer)

    def end_slow_message(self, since_s: float) -> bool:
        """End the call whose large message has been coming in for longest, if that began before `since_s`."""
        for number, stream in self._incomplete.items():
            if stream.reserved and stream.opened_s < since_s:
                logger.info("a call of %s ended: its message comes in slowly, and others need the room", self.peer)
                self._end(number, CANCEL)
                return True
        return False

    def room_is_free(self) -> None:
        """There may be room now for a message of this connection's that found none."""
        self._loop.call_soon(self._release_waiting)

    def end_held_call(self) -> bool:
        """End the held call that came last: all connections hold too much, and this one most. False if it has none."""
        number = next((number for number, stream in reversed(self._streams.items()) if stream.num_held), None)
        if number is None:
            return False
        logger.info("a call of %s is refused: too much of its calls waits for the rest of a message", self.peer)
        self._end(number, REFUSED_STREAM)
        return True

    def abort(self) -> None:
        """Close both ends at once."""
        for end in (self._client, self._server):
            if end is not None:
                end.abort()
        self._closed()

    def close(self, code: int = frames.NO_ERROR) -> None:
        """Tell the client why, and close both ends."""
        if self._client is not None and not self.is_closed:
            self._client.write(frames.goaway(self._last_stream, code))
            self._hang_up(self._client)
        if self._server is not None:
            self._server.abort()
        self._closed()

    @property
    def has_ended(self) -> bool:
        """Whether both ends are closed."""
        return self.is_closed and not self._num_ends

    async def ended(self) -> None:
        """Return when both ends are closed."""
        if self._num_ends:
            await self._ends_lost.wait()

    def _hang_up(self, end: asyncio.Transport) -> None:
        """Close an end; what it does not take soon is lost."""
        if end.is_closing():
            # A TLS transport that is closed twice can no longer be aborted.
            return
        end.close()
        self._loop.call_later(_FLUSH_S, end.abort)

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
        """Go through the whole frames that have come, as far as the connection's budget goes."""
        try:
            if self.has_preface or self._read_preface():
                self._read_frames()
        except ProtocolError as error:
            logger.info("%s is hung up on: %s", self.peer, error)
            self.close(error.code)

    def _read_preface(self) -> bool:
        if len(self._inbound) < len(PREFACE):
            if not PREFACE.startswith(self._inbound):
                raise ProtocolError("no HTTP/2 preface")
            return False
        if not self._inbound.startswith(PREFACE):
            raise ProtocolError("no HTTP/2 preface")
        if len(self._inbound) < len(PREFACE) + HEAD_BYTES:
            return False
        if self._inbound[len(PREFACE) + 3] != SETTINGS:
            raise ProtocolError("the first frame is not SETTINGS")
        if not self._turnstile.take(self.account, START_UNITS):
            self._pause("turn")
            return False
        self.has_preface = True
        del self._inbound[: len(PREFACE)]
        self._ready(self)
        if self.is_closed:
            return False
        self._dialing = self._dial(End(self._from_server, self._server_lost, self._server_writable, self._server_made))
        self._dialing.add_done_callback(self._connected)
        self._pause("server")
        return False

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

    def _read_frames(self) -> None:
        inbound, at = self._inbound, 0
        out: list[bytes] = []
        try:
            while len(inbound) - at >= HEAD_BYTES:
                first, flags, number = HEAD.unpack_from(inbound, at)
                length, kind, number = first >> 8, first & 0xFF, number & MAX_WINDOW_BYTES
                if length > MAX_FRAME_BYTES:
                    raise ProtocolError("a frame of more than 16 KiB", FRAME_SIZE_ERROR)
                if len(inbound) - at < HEAD_BYTES + length:
                    break
                if not self._turnstile.take(self.account, _units(kind, flags, length)):
                    self._pause("turn")
                    break
                at += HEAD_BYTES
                payload = bytes(inbound[at : at + length])
                at += length
                if self._block is not None and kind != CONTINUATION:
                    raise ProtocolError("a frame within a header block")
                if kind == DATA:
                    self._data(number, flags, payload, out)
                else:
                    self._other_frame(kind, flags, number, payload, out)
        finally:
            del inbound[:at]
            if out and self._server is not None:
                self._server.write(b"".join(out))

    def _other_frame(self, kind: int, flags: int, number: int, payload: bytes, out: list[bytes]) -> None:
        if kind in (HEADERS, CONTINUATION):
            self._header_frame(kind, flags, number, payload, out)
        elif kind == RST_STREAM:
            self._client_reset(number, payload, out)
        elif kind == WINDOW_UPDATE:
            self._client_window(number, payload, out)
        elif kind == SETTINGS:
            self._client_settings(flags, payload, out)
        elif kind in (PING, GOAWAY):
            if number or (kind == PING and len(payload) != 8):
                raise ProtocolError("a malformed frame of the connection")
            out.append(frames.frame(kind, flags, 0, payload))
        elif kind == PUSH_PROMISE:
            raise ProtocolError("PUSH_PROMISE from a client")
        # PRIORITY and frames of unknown kinds go no further.

    def _data(self, number: int, flags: int, payload: bytes, out: list[bytes]) -> None:
        stream = self._streams.get(number)
        if stream is None or stream.client_ended:
            if number == 0 or number > self._last_stream:
                raise ProtocolError("DATA of no stream")
            self._turnstile.charge(self.account, _LOST_DATA_UNITS)
            self._give_back(len(payload))
            return
        num_before, large_before = stream.messages.num_complete, stream.messages.num_large_bytes
        try:
            stream.messages.add(content(DATA, flags, payload))
        except MessageTooLargeError:
            # Of our methods gRPC refuses it, and says so; it does not keep it.
            if not stream.is_ours:
                self._give_back(len(payload))
                self._end(number, ENHANCE_YOUR_CALM)
                return
        if stream.is_unary and stream.messages.num_begun > 1:
            self._give_back(len(payload))
            self._end(number, PROTOCOL_ERROR)
            return
        if (num_messages := stream.messages.num_complete - num_before) > _FREE_MESSAGES:
            self._turnstile.charge(self.account, _MESSAGE_UNITS * num_messages)
        if stream.is_streaming and (num_bytes := stream.messages.num_large_bytes - large_before):
            self._turnstile.charge(self.account, _LARGE_BYTE_UNITS * num_bytes)
        if stream.upstream:
            self._pass_on(number, stream, flags, payload, out)
            return
        stream.hold(flags, payload)
        # What is held must not keep others of the connection from sending.
        self._give_back(len(payload))
        self._room.hold(self, len(payload))
        if number in self._streams:
            self._maybe_release(number, stream, out)

    def _pass_on(self, number: int, stream: HttpStream, flags: int, payload: bytes, out: list[bytes]) -> None:
        out.append(HEAD.pack(len(payload) << 8, flags, stream.upstream))
        out.append(payload)
        if stream.reserved and stream.messages.num_complete:
            self._free(stream)
            self._incomplete.pop(number, None)
        if flags & END_STREAM:
            stream.client_ended = True
            self._incomplete.pop(number, None)
            if stream.server_ended:
                self._forget(number)

    def _header_frame(self, kind: int, flags: int, number: int, payload: bytes, out: list[bytes]) -> None:
        if kind == HEADERS:
            if number % 2 == 0:
                raise ProtocolError("HEADERS of no stream of a client's")
            block = bytearray(content(HEADERS, flags, payload))
            self._block = (number, flags, block)
        elif self._block is None or self._block[0] != number:
            raise ProtocolError("CONTINUATION of no header block")
        else:
            self._block[2].extend(payload)
        number, first_flags, block = self._block
        if len(block) > _MAX_BLOCK_BYTES:
            raise ProtocolError("a header block of more than 128 KiB", ENHANCE_YOUR_CALM)
        if flags & END_HEADERS:
            self._block = None
            self._open(number, first_flags, self._decoded(bytes(block)), out)

    def _decoded(self, block: bytes) -> Headers:
        try:
            headers = [(bytes(name), bytes(value)) for name, value, *_ in self._decoder.decode(block, raw=True)]
            # What an entry of the dynamic table stands for is longer than its number.
            num_bytes = max(len(block), sum(len(name) + len(value) for name, value in headers))
            self._turnstile.charge(self.account, _ENTRY_UNITS * len(headers) + _BYTE_UNITS * num_bytes)
            return headers
        except (HPACKError, IndexError, ValueError, OverflowError) as error:
            raise ProtocolError(f"a header block that cannot be read: {error}", COMPRESSION_ERROR) from error

    def _open(self, number: int, flags: int, headers: Headers, out: list[bytes]) -> None:
        if number <= self._last_stream:
            # Trailers, which no gRPC client sends.
            if number in self._streams:
                self._end(number, PROTOCOL_ERROR)
                return
            raise ProtocolError("a stream that is closed, or behind a later one")
        self._last_stream = number
        path = next((value for name, value in headers if name == b":path"), b"")
        if not _METHOD.fullmatch(path):
            raise ProtocolError("a method that is no printable text")
        if len(self._streams) >= self._limits.max_streams:
            self._to_client(frames.reset(number, REFUSED_STREAM))
            return
        if not all(_is_metadata(name, value) for name, value in headers):
            self._answer(number, _INVALID_ARGUMENT, "metadata that is no printable ASCII")
            return
        if sum(len(name) + len(value) + _ENTRY_BYTES for name, value in headers) > MAX_METADATA_BYTES:
            self._answer(number, _RESOURCE_EXHAUSTED, f"metadata of more than {MAX_METADATA_BYTES} bytes")
            return
        is_ours = path.startswith(OURS)
        if not is_ours and sum(not other.is_ours for other in self._streams.values()) >= self._limits.max_other:
            self._to_client(frames.reset(number, REFUSED_STREAM))
            return
        most = self._limits.max_message_bytes if is_ours else OTHER_MESSAGE_BYTES
        named = [(name, value) for name, value in headers if name.lower() != _PEER]
        now_s = self._loop.time()
        deadline_s = now_s + self._limits.first_message_s
        stream = HttpStream([*named, (_PEER, self.peer.encode())], Messages(most), self._window, now_s, deadline_s)
        stream.client_ended = bool(flags & END_STREAM)
        stream.is_ours = is_ours
        stream.is_unary = path in self._limits.unary
        if path in self._limits.streaming:
            if sum(other.is_streaming for other in self._streams.values()) >= self._limits.max_streaming:
                self._to_client(frames.reset(number, REFUSED_STREAM))
                return
            stream.is_streaming = True
            self._streams[number] = stream
            self._release(number, stream, out)
            return
        self._streams[number] = self._incomplete[number] = stream
        self._maybe_release(number, stream, out)

    def _answer(self, number: int, status: int, message: str) -> None:
        """End a call that is not opened, with a gRPC status."""
        headers = [
            (b":status", b"200"),
            (b"content-type", b"application/grpc"),
            (b"grpc-status", str(status).encode()),
            (b"grpc-message", message.encode()),
        ]
        self._to_client(frames.header_frames(number, headers, ends_stream=True))
        self._to_client(frames.reset(number, frames.NO_ERROR))

    def _maybe_release(self, number: int, stream: HttpStream, out: list[bytes]) -> None:
        """Pass a call on to the server, if what it needs is there."""
        if stream.window < _MIN_WINDOW_BYTES:
            return
        size = stream.messages.size
        is_complete = stream.messages.num_complete > 0 or stream.client_ended
        # One that is too large is refused by gRPC when it sees the length.
        is_refused = size > stream.messages.max_bytes
        if not is_complete:
            if size <= LARGE_BYTES and not is_refused:
                return
            if not is_refused and not self._reserve(stream, size):
                return
        if is_complete or is_refused:
            self._incomplete.pop(number, None)
        self._release(number, stream, out)

    def _release(self, number: int, stream: HttpStream, out: list[bytes]) -> None:
        stream.upstream, self._next_upstream = self._next_upstream, self._next_upstream + 2
        self._by_upstream[stream.upstream] = number
        ends_at_once = stream.client_ended and not stream.frames
        out.append(frames.header_frames(stream.upstream, stream.headers or [], ends_stream=ends_at_once))
        out += [frames.frame(DATA, flags, stream.upstream, payload) for flags, payload in stream.frames]
        out.append(frames.window_update(stream.upstream, stream.credit))
        self._granted += stream.num_held
        self._room.hold(self, -stream.num_held)
        stream.headers, stream.frames, stream.num_held = None, [], 0

    def _reserve(self, stream: HttpStream, size: int) -> bool:
        now_s = self._loop.time()
        if not self._room.take(self, size, now_s):
            return False
        stream.reserved = size
        stream.deadline_s = now_s + self._limits.first_message_s + size / _SLOWEST_BYTES_PER_S
        return True

    def _free(self, stream: HttpStream) -> None:
        self._room.give_back(self, stream.reserved)
        stream.reserved = 0

    def _release_waiting(self) -> None:
        """Try the held calls again: there may be room now."""
        out: list[bytes] = []
        for number, stream in list(self._incomplete.items()):
            if not stream.upstream:
                self._maybe_release(number, stream, out)
        if out and self._server is not None:
            self._server.write(b"".join(out))

    def _client_reset(self, number: int, payload: bytes, out: list[bytes]) -> None:
        if number == 0 or number > self._last_stream or len(payload) != NUMBER.size:
            raise ProtocolError("RST_STREAM of no stream")
        if (stream := self._streams.get(number)) is None:
            return
        if stream.upstream:
            out.append(frames.frame(RST_STREAM, 0, stream.upstream, payload))
        self._forget(number)

    def _client_window(self, number: int, payload: bytes, out: list[bytes]) -> None:
        if len(payload) != NUMBER.size:
            raise ProtocolError("WINDOW_UPDATE of another size", FRAME_SIZE_ERROR)
        (amount,) = NUMBER.unpack(payload)
        amount &= MAX_WINDOW_BYTES
        if number == 0:
            out.append(frames.frame(WINDOW_UPDATE, 0, 0, payload))
            return
        if number > self._last_stream:
            raise ProtocolError("WINDOW_UPDATE of no stream")
        if (stream := self._streams.get(number)) is None:
            return
        if stream.upstream:
            out.append(frames.frame(WINDOW_UPDATE, 0, stream.upstream, payload))
            return
        stream.window += amount
        stream.credit += amount
        if stream.window > MAX_WINDOW_BYTES or not amount:
            self._end(number, FLOW_CONTROL_ERROR)
            return
        self._maybe_release(number, stream, out)

    def _client_settings(self, flags: int, payload: bytes, out: list[bytes]) -> None:
        if flags & ACK:
            out.append(frames.frame(SETTINGS, ACK, 0))
            return
        values = frames.parse_settings(payload)
        window = values.get(frames.SETTINGS_INITIAL_WINDOW_SIZE, self._window)
        if window > MAX_WINDOW_BYTES:
            raise ProtocolError("a window of more than 2 GiB", FLOW_CONTROL_ERROR)
        change, self._window = window - self._window, window
        if not self._streams:
            change = 0
        # The server's header blocks use no dynamic table, and its frames have the least size that all clients take.
        values.pop(frames.SETTINGS_MAX_FRAME_SIZE, None)
        values[frames.SETTINGS_HEADER_TABLE_SIZE] = 0
        out.append(frames.settings(values.items()))
        for number, stream in list(self._incomplete.items()) if change else ():
            if not stream.upstream:
                stream.window += change
                self._maybe_release(number, stream, out)

    # The server's end.

    def _server_made(self, transport: asyncio.Transport) -> None:
        self._count_ends(1)

    def _server_lost(self) -> None:
        self._count_ends(-1)
        if self._client is not None:
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
        outbound = self._outbound
        outbound += data
        # Frames up to `at` have been gone through; those from `start` on are passed on as they are.
        at = start = 0
        out: list[bytes] = []
        refused = 0
        while len(outbound) - at >= HEAD_BYTES:
            first, flags, number = HEAD.unpack_from(outbound, at)
            length, kind = first >> 8, first & 0xFF
            after = at + HEAD_BYTES + length
            if len(outbound) < after:
                break
            client_number = self._by_upstream.get(number) if number else None
            if client_number != number and kind != PING:
                out.append(bytes(outbound[start:at]))
                start = after
                payload = bytes(outbound[at + HEAD_BYTES : after])
                if not number:
                    out.append(self._of_connection(kind, flags, payload))
                elif client_number is None:
                    # The client has given the call up.
                    refused += length if kind == DATA else 0
                else:
                    out += (HEAD.pack(first, flags, client_number), payload)
            at = after
            is_last = kind == RST_STREAM or (flags & END_STREAM and kind in (DATA, HEADERS))
            if is_last and client_number is not None:
                self._server_ended(client_number, is_reset=kind == RST_STREAM)
        out.append(bytes(outbound[start:at]))
        del outbound[:at]
        self._to_client(b"".join(out))
        if refused and self._server is not None:
            self._server.write(frames.window_update(0, refused))

    def _of_connection(self, kind: int, flags: int, payload: bytes) -> bytes:
        """The client's form of a frame of the server's that belongs to no call."""
        if kind == SETTINGS and not flags & ACK:
            values = frames.parse_settings(payload)
            # Ours: what clients may send is read by the guard.
            for ours in (frames.SETTINGS_HEADER_TABLE_SIZE, frames.SETTINGS_MAX_FRAME_SIZE):
                values.pop(ours, None)
            return frames.settings(values.items())
        if kind == GOAWAY:
            return self._goaway(payload)
        if kind == WINDOW_UPDATE:
            (amount,) = NUMBER.unpack(payload)
            known = min(amount, self._granted)
            self._granted -= known
            return frames.window_update(0, amount - known)
        return frames.frame(kind, flags, 0, payload)

    def _goaway(self, payload: bytes) -> bytes:
        """GOAWAY with the client's number of the last call that the server takes; held ones are refused."""
        (last,) = NUMBER.unpack_from(payload)
        if last == MAX_WINDOW_BYTES:
            return frames.frame(GOAWAY, 0, 0, payload)
        held = [number for number, stream in self._streams.items() if not stream.upstream]
        taken = [number for upstream, number in self._by_upstream.items() if upstream <= last]
        resets = b"".join(frames.reset(number, REFUSED_STREAM) for number in held)
        for number in held:
            self._forget(number)
        last = max([*taken, *held], default=self._last_stream)
        return resets + frames.frame(GOAWAY, 0, 0, NUMBER.pack(last) + payload[NUMBER.size :])

    def _server_ended(self, number: int, *, is_reset: bool) -> None:
        stream = self._streams[number]
        stream.server_ended = True
        if is_reset or stream.client_ended:
            self._forget(number)

    # Both.

    def _end(self, number: int, code: int) -> None:
        """End a call on both sides."""
        stream = self._streams[number]
        self._to_client(frames.reset(number, code))
        if stream.upstream and self._server is not None:
            self._server.write(frames.reset(stream.upstream, CANCEL))
        self._forget(number)

    def _forget(self, number: int) -> None:
        stream = self._streams.pop(number)
        self._incomplete.pop(number, None)
        self._by_upstream.pop(stream.upstream, None)
        self._room.hold(self, -stream.num_held)
        self._free(stream)

    def _give_back(self, num_bytes: int) -> None:
        """Let the client send as many bytes again: the server never sees those that it sent."""
        if num_bytes:
            self._to_client(frames.window_update(0, num_bytes))

    def _to_client(self, data: bytes) -> None:
        if data and self._client is not None and not self.is_closed:
            self._client.write(data)

    def _closed(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._turnstile.close(self.account)
        for stream in self._streams.values():
            self._free(stream)
            self._room.hold(self, -stream.num_held)
        self._streams, self._by_upstream, self._incomplete = {}, {}, {}
        self._inbound, self._outbound = bytearray(), bytearray()
        self._gone(self)


def _is_metadata(name: bytes, value: bytes) -> bool:
    return bool(_NAME.fullmatch(name) and (name.endswith(b"-bin") or _TEXT.fullmatch(value)))


def _units(kind: int, flags: int, length: int) -> float:
    if kind == DATA:
        of_frame = _DATA_UNITS if length or flags & END_STREAM else _EMPTY_UNITS
    else:
        of_frame = _UNITS.get(kind, _OTHER_UNITS)
    return of_frame + length * _UNITS_PER_BYTE.get(kind, _OTHER_UNITS_PER_BYTE)
