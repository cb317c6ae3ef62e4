"""A synchronous HTTP/2 client on a raw socket, for frames that no gRPC library sends and for many of them a second."""

from __future__ import annotations

import contextlib
import json
import resource
import select
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.raw_http2 import ACK, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, Header, frame

DATA, PRIORITY, RST_STREAM, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 2, 3, 6, 7, 8, 9
ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 2, 3, 4, 5
PADDED = 8
CANCEL = (8).to_bytes(4, "big")
FRAME_HEAD_BYTES = 9
MAX_FRAME_BYTES = 16_384
DEFAULT_WINDOW = 65_535
MAX_WINDOW = 2**31 - 1
MAX_STREAM = 2**31 - 1
# Without SETTINGS_MAX_CONCURRENT_STREAMS HTTP/2 sets no limit.
NO_STREAM_LIMIT = 1 << 31
_READ_BYTES = 1 << 20
# Calls of `send` on one connection, before others have a turn.
_TURNS = 4
_CONNECT_S = 1.0
_HANDSHAKE_S = 2.0
# Of connections that keep few bytes.
_NARROW_BUFFER_BYTES, _NARROW_SEGMENT_BYTES = 2048, 536
# Before a connection is opened again that was refused or closed at once.
_RECONNECT_PAUSE_S = 0.01
_SHORT_LIFE_S = 0.05


class ClosedError(Exception):
    """The server closed, reset or refused the connection."""


class TimeIsUpError(Exception):
    """The attack has run for as long as it may."""


class TlsSocket:
    """A socket without blocking that speaks TLS, with the methods of a socket that `Connection` uses.

    Raises:
        OSError: the server does not accept the handshake within 2 s.
    """

    def __init__(self, plain: socket.socket, context: ssl.SSLContext) -> None:
        plain.settimeout(_HANDSHAKE_S)
        try:
            self._socket = context.wrap_socket(plain, server_hostname=plain.getpeername()[0])
        except OSError:
            plain.close()
            raise

    def setblocking(self, flag: bool) -> None:
        """As `socket.setblocking`."""
        self._socket.setblocking(flag)

    def setsockopt(self, level: int, name: int, value: int) -> None:
        """As `socket.setsockopt`."""
        self._socket.setsockopt(level, name, value)

    def fileno(self) -> int:
        """As `socket.fileno`."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket without an end of TLS."""
        self._socket.close()

    def send(self, data: bytes | memoryview) -> int:
        """As `socket.send`.

        Raises:
            BlockingIOError: nothing can be sent now.
        """
        try:
            return self._socket.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def recv(self, size: int) -> bytes:
        """As `socket.recv`.

        Raises:
            BlockingIOError: nothing has come.
        """
        try:
            return self._socket.recv(size)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error


@dataclass(frozen=True)
class Target:
    """What is attacked: a service's name, its address, and a local address to connect from."""

    service: str
    host: str
    port: int
    source: str
    path: bytes
    # With which connections are opened; None: in plaintext.
    tls: ssl.SSLContext | None = None


@dataclass
class Attempt:
    """One attack on one target: when it ends (`time.monotonic`, in seconds), and counts of what it did."""

    target: Target
    until_s: float
    tally: Counter[str] = field(default_factory=Counter)

    @property
    def left_s(self) -> float:
        """Seconds until the attack is over; 0 afterwards."""
        return max(0.0, self.until_s - time.monotonic())

    def check(self) -> None:
        """Raise TimeIsUpError when the attack is over."""
        if time.monotonic() >= self.until_s:
            raise TimeIsUpError

    def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, or until the attack is over.

        Raises:
            TimeIsUpError: it is over.
        """
        time.sleep(max(0.0, min(seconds, self.left_s)))
        self.check()

    def try_connect(self, *, is_narrow: bool = False) -> socket.socket | None:
        """Open a TCP connection and say nothing; None when it was refused.

        A narrow one takes small segments into a small buffer, so that the server's socket keeps little, too.

        Raises:
            TimeIsUpError: the attack is over.
        """
        self.check()
        connected = socket.socket()
        try:
            if is_narrow:
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _NARROW_BUFFER_BYTES)
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _NARROW_SEGMENT_BYTES)
            connected.settimeout(_CONNECT_S)
            connected.bind((self.target.source, 0))
            connected.connect((self.target.host, self.target.port))
        except OSError:
            connected.close()
            self.tally["refused"] += 1
            return None
        self.tally["connections"] += 1
        return connected

    def try_open(self, settings: Mapping[int, int] | None = None, *, greets: bool = True) -> Connection | None:
        """Open one connection; None when it was refused or closed during the handshake.

        Raises:
            TimeIsUpError: the attack is over.
        """
        self.check()
        try:
            connection = Connection(self)
        except OSError:
            self.tally["refused"] += 1
            return None
        self.tally["connections"] += 1
        if greets:
            try:
                connection.greet(settings or {})
            except ClosedError:
                connection.close()
                return None
            except TimeIsUpError:
                connection.close()
                raise
        return connection

    def open(self, settings: Mapping[int, int] | None = None, *, greets: bool = True) -> Connection:
        """Open a connection, trying again until there is one.

        Raises:
            TimeIsUpError: the attack is over.
        """
        while (connection := self.try_open(settings, greets=greets)) is None:
            self.sleep(_RECONNECT_PAUSE_S)
        return connection

    def repeat(
        self,
        body: Callable[[Connection], None],
        settings: Mapping[int, int] | None = None,
        *,
        greets: bool = True,
    ) -> None:
        """Run `body` on a new connection again and again until the attack is over, which raises TimeIsUpError."""
        while True:
            connection = self.open(settings, greets=greets)
            started = time.monotonic()
            with contextlib.suppress(ClosedError), connection:
                body(connection)
            if time.monotonic() - started < _SHORT_LIFE_S:
                self.sleep(_RECONNECT_PAUSE_S)

    def swarm(
        self,
        count: int,
        step: Callable[[Connection], None],
        settings: Mapping[int, int] | None = None,
        *,
        greets: bool = True,
        pause_s: float = 0.0,
    ) -> None:
        """Hold `count` connections until the attack is over; those that are lost are opened again.

        `step` is called for each of them in turn, with `pause_s` after each turn. It has to return soon.

        Raises:
            TimeIsUpError: the attack is over.
        """
        connections: list[Connection | None] = [None] * count
        try:
            while True:
                for index, connection in enumerate(connections):
                    current = connection or self.try_open(settings, greets=greets)
                    connections[index] = current
                    if current is not None and not self._stepped(current, step):
                        connections[index] = None
                self.tally["most at once"] = max(
                    self.tally["most at once"], sum(connection is not None for connection in connections)
                )
                self.sleep(pause_s)
        finally:
            for connection in connections:
                if connection is not None:
                    connection.close()

    def _stepped(self, connection: Connection, step: Callable[[Connection], None]) -> bool:
        try:
            step(connection)
        except ClosedError:
            connection.close()
            return False
        return True


class Connection:
    """One connection. Everything that waits raises ClosedError when it is lost and TimeIsUpError at the attack's end.

    Raises:
        OSError: the server does not accept it.
    """

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.tally = attempt.tally
        target = attempt.target
        plain = socket.create_connection((target.host, target.port), _CONNECT_S, (target.source, 0))
        self._socket: socket.socket | TlsSocket = plain if target.tls is None else TlsSocket(plain, target.tls)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._input = bytearray()
        # Frames that answer the server's, and whether they have to wait for the end of what is being sent.
        self._answers = b""
        self._is_sending = False
        self.next_stream = 1
        self.max_streams = NO_STREAM_LIMIT
        # Whether the server's first SETTINGS have come.
        self.is_greeted = False
        # What the server still takes: of the connection, and of each stream that has sent or was given something.
        self.window = DEFAULT_WINDOW
        self.initial_window = DEFAULT_WINDOW
        self.windows: dict[int, int] = {}
        # Streams that this client has opened and the server has not ended.
        self.running: set[int] = set()
        # For `step` functions of swarms.
        self.stage = 0
        self.next_s = 0.0

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def greet(self, settings: Mapping[int, int]) -> None:
        """Send preface and SETTINGS, wait for the server's SETTINGS and acknowledge them.

        Raises:
            ClosedError: there were none within 2 s, or the server closed the connection.
        """
        self.send(PREFACE + settings_frame(settings))
        end_s = time.monotonic() + _HANDSHAKE_S
        while not self.is_greeted:
            if time.monotonic() > end_s:
                raise ClosedError
            self.wait(0.1)

    def send(self, data: bytes | memoryview, *, reads: bool = True) -> None:
        """Send all of `data`; meanwhile take in what comes, or leave it where it is."""
        rest = memoryview(data)
        self._is_sending = True
        try:
            while rest:
                self.attempt.check()
                try:
                    sent = self._socket.send(rest)
                except BlockingIOError:
                    self._wait_to_send(reads=reads)
                    continue
                except OSError as error:
                    self._lost(error)
                self.tally["bytes"] += sent
                rest = rest[sent:]
        finally:
            self._is_sending = False
        self._answer()

    def send_now(self, data: memoryview, begin: int) -> int:
        """Send what is taken at once of `data` without its first `begin` bytes, from the start again after its end.

        Returns where the rest begins.
        """
        for _ in range(_TURNS):
            try:
                sent = self._socket.send(data[begin:])
            except BlockingIOError:
                break
            except OSError as error:
                self._lost(error)
            self.tally["bytes"] += sent
            begin = (begin + sent) % len(data)
        return begin

    def flood(self, blocks: Iterable[tuple[bytes, int]], *, reads: bool = True) -> None:
        """Send blocks of frames, given with their number of frames; input is dropped unread or left where it is."""
        for data, count in blocks:
            self.send(data, reads=False)
            self.tally["frames"] += count
            if reads:
                self.drop_input()

    def drop_input(self) -> None:
        """Throw away what has come."""
        while self._receive():
            pass

    def take(self) -> None:
        """Take in the frames that have come, and answer SETTINGS and PING."""
        while data := self._receive():
            self._input += data
            self._take_frames()

    def wait(self, seconds: float) -> None:
        """Wait until something comes, at most `seconds`, and take it in."""
        self.attempt.check()
        if self._poll.poll(1000 * min(seconds, self.attempt.left_s)):
            self.take()

    def hold(self, *, reads: bool = True) -> None:
        """Keep the connection until the server closes it or the attack is over, which raises.

        Without `reads` nothing is taken in; that the server has closed it is then seen by poll alone.
        """
        gone = select.POLLHUP | select.POLLERR | select.POLLRDHUP
        self._poll.modify(self._socket, select.POLLIN if reads else select.POLLRDHUP)
        while True:
            if reads:
                self.wait(0.2)
            elif any(event & gone for _, event in self._poll.poll(0)):
                raise self._closed()
            else:
                self.attempt.sleep(0.2)

    def open_stream(self, block: bytes, *, ends: bool = False) -> int:
        """Send HEADERS for a new stream; returns its id."""
        stream = self.next_stream
        self.next_stream += 2
        self.running.add(stream)
        self.send(frame(HEADERS, END_HEADERS | (END_STREAM if ends else 0), stream, block))
        self.tally["streams"] += 1
        return stream

    def can_open(self) -> bool:
        """Whether the server's limit leaves room for another stream."""
        return len(self.running) < self.max_streams

    def send_some(self, stream: int, data: memoryview, *, ends: bool = True) -> int:
        """Send as much of a message as the windows take, at most one frame; returns the number of bytes."""
        size = min(len(data), MAX_FRAME_BYTES, self.window, self.windows.get(stream, self.initial_window))
        if size <= 0:
            return 0
        flags = END_STREAM if ends and size == len(data) else 0
        self.send(frame(DATA, flags, stream, bytes(data[:size])))
        self.window -= size
        self.windows[stream] = self.windows.get(stream, self.initial_window) - size
        return size

    def send_message(self, stream: int, message: bytes, *, ends: bool = True) -> bool:
        """Send a message within the windows; False when the server ended the stream before it was all sent."""
        rest = memoryview(message)
        while rest:
            if stream not in self.running:
                return False
            size = self.send_some(stream, rest, ends=ends)
            rest = rest[size:]
            if size:
                self.take()
            else:
                self.wait(0.1)
        self.tally["messages"] += 1
        return True

    def _receive(self) -> bytes:
        """What has come, at most a MiB; empty when nothing has."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return b""
        except OSError as error:
            self._lost(error)
        if not data:
            raise self._closed()
        return data

    def _lost(self, error: OSError) -> None:
        raise self._closed() from error

    def _closed(self) -> ClosedError:
        self.tally["closed by server"] += 1
        return ClosedError()

    def _wait_to_send(self, *, reads: bool) -> None:
        events = select.POLLOUT | (select.POLLIN if reads else 0)
        self._poll.modify(self._socket, events)
        try:
            ready = self._poll.poll(100)
        finally:
            self._poll.modify(self._socket, select.POLLIN)
        if reads and any(event & select.POLLIN for _, event in ready):
            self.take()

    def _take_frames(self) -> None:
        data, begin = self._input, 0
        answers = []
        while len(data) - begin >= FRAME_HEAD_BYTES:
            end = begin + FRAME_HEAD_BYTES + int.from_bytes(data[begin : begin + 3], "big")
            if end > len(data):
                break
            kind, flags = data[begin + 3], data[begin + 4]
            stream = int.from_bytes(data[begin + 5 : begin + 9], "big") & MAX_STREAM
            answers.append(self._take_frame(kind, flags, stream, bytes(data[begin + FRAME_HEAD_BYTES : end])))
            begin = end
        del data[:begin]
        self._answers += b"".join(answers)
        self._answer()

    def _answer(self) -> None:
        """Send the answers that are due, unless a frame is being sent, which they would cut in two."""
        if self._answers and not self._is_sending:
            answers, self._answers = self._answers, b""
            self.send(answers, reads=False)

    def _take_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        """Take in one frame; returns what is to be sent for it."""
        if kind == SETTINGS and not flags & ACK:
            self._take_settings(payload)
            return frame(SETTINGS, ACK, 0)
        if kind == PING and not flags & ACK:
            return frame(PING, ACK, 0, payload)
        if kind == WINDOW_UPDATE:
            increment = int.from_bytes(payload, "big")
            if stream:
                self.windows[stream] = self.windows.get(stream, self.initial_window) + increment
            else:
                self.window += increment
        elif kind == GOAWAY:
            self.tally["goaway"] += 1
        elif kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self._end(stream, "reset" if kind == RST_STREAM else "answered")
        return b""

    def _end(self, stream: int, how: str) -> None:
        if stream in self.running:
            self.running.discard(stream)
            self.windows.pop(stream, None)
            self.tally[f"streams {how}"] += 1

    def _take_settings(self, payload: bytes) -> None:
        self.is_greeted = True
        for start in range(0, len(payload), 6):
            name = int.from_bytes(payload[start : start + 2], "big")
            value = int.from_bytes(payload[start + 2 : start + 6], "big")
            if name == MAX_CONCURRENT_STREAMS:
                self.max_streams = value
            elif name == INITIAL_WINDOW_SIZE:
                for stream in self.windows:
                    self.windows[stream] += value - self.initial_window
                self.initial_window = value


def settings_frame(settings: Mapping[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(k.to_bytes(2, "big") + v.to_bytes(4, "big") for k, v in settings.items()))


def window_update(stream: int, increment: int) -> bytes:
    """A WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


def integer(value: int, prefix_bits: int, first: int) -> bytes:
    """An integer of HPACK behind the bits of `first`."""
    most = (1 << prefix_bits) - 1
    if value < most:
        return bytes((first | value,))
    encoded, value = bytearray((first | most,)), value - most
    while value >= 128:
        encoded.append(value % 128 + 128)
        value //= 128
    encoded.append(value)
    return bytes(encoded)


def literal(name: bytes, value: bytes, *, is_indexed: bool = False) -> bytes:
    """A header as a literal of any length; `is_indexed` puts it into the server's dynamic table."""
    first = b"\x40" if is_indexed else b"\x00"
    return first + integer(len(name), 7, 0) + name + integer(len(value), 7, 0) + value


def request_block(path: bytes, more: Sequence[Header] = (), *, is_indexed: bool = False) -> bytes:
    """The headers of a call. With `is_indexed` all but method and scheme enter the server's dynamic table."""
    headers = [
        (b":path", path),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *more,
    ]
    # Method and scheme are in HPACK's static table.
    return b"\x83\x86" + b"".join(literal(name, value, is_indexed=is_indexed) for name, value in headers)


# The call that `request_block(…, is_indexed=True)` without `more` has put into the dynamic table, once more.
INDEXED_CALL = b"\x83\x86\xc1\xc0\xbf\xbe"


def framed(message: bytes, *, is_compressed: bool = False) -> bytes:
    """A message as gRPC sends it: a flag, the length, the bytes."""
    return bytes((is_compressed,)) + len(message).to_bytes(4, "big") + message


def numbered(template: bytes, id_offsets: Sequence[int], first_stream: int, count: int) -> bytes:
    """`count` copies of some frames, for streams first_stream, first_stream + 2 and so on.

    `id_offsets` are where in the template the stream ids stand.
    """
    rows = np.tile(np.frombuffer(template, np.uint8), (count, 1))
    ids = np.arange(first_stream, first_stream + 2 * count, 2, dtype=">u4").view(np.uint8).reshape(count, 4)
    for offset in id_offsets:
        rows[:, offset : offset + 4] = ids
    return rows.tobytes()


def allow_many_files() -> None:
    """Let this process open as many files as the system permits it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def as_json(tally: Mapping[str, int]) -> str:
    """Counts as one line."""
    return json.dumps(dict(tally))
