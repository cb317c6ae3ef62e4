"""HTTP/2 by hand: what no gRPC library would send, since it checks its own headers and we must bear anybody's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, SETTINGS = 1, 4
END_STREAM, END_HEADERS, ACK = 1, 4, 1
_HEAD_BYTES = 9

Header = tuple[bytes, bytes]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def header_block(headers: Sequence[Header]) -> bytes:
    """Headers as literals, each of less than 127 bytes, neither indexed nor compressed."""
    return b"".join(b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value for name, value in headers)


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, int, int, bytes]:
    """Kind, flags, stream and payload of the next frame."""
    head = await reader.readexactly(_HEAD_BYTES)
    payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
    return head[3], head[4], int.from_bytes(head[5:], "big"), payload


async def call(address: str, path: bytes, more: Sequence[Header] = ()) -> None:
    """Call a method of any name, and wait until the server has answered or hung up."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    headers = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"localhost"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        *more,
    ]
    writer.write(PREFACE + frame(SETTINGS, 0, 0))
    writer.write(frame(HEADERS, END_HEADERS | END_STREAM, 1, header_block(headers)))
    try:
        async with asyncio.timeout(2.0):
            while (await read_frame(reader))[0] != HEADERS:
                pass
    except (TimeoutError, OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.transport.abort()
