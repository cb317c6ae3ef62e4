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
