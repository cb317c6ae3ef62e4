"""A call by hand whose client takes as little as it likes: HTTP/2 windows are its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from tests.raw_http2 import END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame, header_block, read_frame

_DATA, _RST_STREAM, _WINDOW_UPDATE = 0, 3, 8
_INITIAL_WINDOW_SIZE = 4
# Less than one message with log-probabilities takes.
WINDOW_BYTES = 1024


@dataclass
class SlowReader:
    """Calls on one connection, as far as they have come; keyed by the number of the call, from 1 on."""

    writer: asyncio.StreamWriter
    num_bytes: dict[int, int] = field(default_factory=dict)
    # The last headers of calls that have ended, as they came; empty where the server has reset the call.
    ends: dict[int, bytes] = field(default_factory=dict)

    def call(self, number: int, path: bytes, message: bytes) -> None:
        """Begin a call with one message."""
        headers = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        ]
        stream = 2 * number - 1
        self.writer.write(frame(HEADERS, END_HEADERS, stream, header_block(headers)))
        self.writer.write(frame(_DATA, END_STREAM, stream, b"\0" + len(message).to_bytes(4, "big") + message))

    def take(self, number: int, num_bytes: int) -> None:
        """Let the server send so many bytes more of a call."""
        self.writer.write(frame(_WINDOW_UPDATE, 0, 2 * number - 1, num_bytes.to_bytes(4, "big")))
        self.writer.write(frame(_WINDOW_UPDATE, 0, 0, num_bytes.to_bytes(4, "big")))

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Note what comes, until the server hangs up."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                kind, flags, stream, payload = await read_frame(reader)
                number = (stream + 1) // 2
                if kind == _DATA:
                    self.num_bytes[number] = self.num_bytes.get(number, 0) + len(payload)
                elif kind == HEADERS and flags & END_STREAM:
                    self.ends[number] = payload
                elif kind == _RST_STREAM:
                    self.ends.setdefault(number, b"")
                elif kind == SETTINGS and not flags & 1:
                    self.writer.write(frame(SETTINGS, 1, 0))


@contextlib.asynccontextmanager
async def slow_reader(address: str) -> AsyncIterator[SlowReader]:
    """A connection whose calls have WINDOW_BYTES bytes each, until they take more."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    window = _INITIAL_WINDOW_SIZE.to_bytes(2, "big") + WINDOW_BYTES.to_bytes(4, "big")
    writer.write(PREFACE + frame(SETTINGS, 0, 0, window))
    slow = SlowReader(writer)
    reading = asyncio.create_task(slow.read(reader))
    try:
        yield slow
    finally:
        reading.cancel()
        writer.transport.abort()
