"""HTTP/2 frames and header blocks (RFC 9113, RFC 7541): reading and writing."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from hpack import Decoder
from hpack.exceptions import HPACKError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
# Flags; ACK applies to SETTINGS and PING, END_STREAM to DATA and HEADERS.
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

# Error codes.
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR = 0x0, 0x1, 0x3
FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL = 0x6, 0x7, 0x8
COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 0x9, 0xB

SETTINGS_HEADER_TABLE_SIZE, SETTINGS_ENABLE_PUSH, SETTINGS_MAX_CONCURRENT_STREAMS = 0x1, 0x2, 0x3
SETTINGS_INITIAL_WINDOW_SIZE, SETTINGS_MAX_FRAME_SIZE = 0x4, 0x5

# Default limit of a frame's payload.
MAX_FRAME_BYTES = 16384
DEFAULT_WINDOW_BYTES = 65535
MAX_WINDOW_BYTES = 2**31 - 1
HEAD_BYTES = 9
# Limit of a header block, encoded and decoded.
MAX_BLOCK_BYTES = 131072

# Length and kind as one number, flags, stream id.
HEAD = struct.Struct(">IBI")
NUMBER = struct.Struct(">I")
_SETTING = struct.Struct(">HI")

Headers = list[tuple[bytes, bytes]]


class ProtocolError(Exception):
    """A frame that HTTP/2 forbids or gRPC clients never send; `code` goes into GOAWAY."""

    def __init__(self, message: str, code: int = PROTOCOL_ERROR) -> None:
        super().__init__(message)
        self.code = code


def read_frame(data: bytearray, at: int) -> tuple[int, int, int, bytes] | None:
    """Kind, flags, stream id and payload of the frame at a place; None while it is incomplete.

    Raises:
        ProtocolError: it is longer than `MAX_FRAME_BYTES`.
    """
    if len(data) - at < HEAD_BYTES:
        return None
    first, flags, number = HEAD.unpack_from(data, at)
    begin, length = at + HEAD_BYTES, first >> 8
    if length > MAX_FRAME_BYTES:
        raise ProtocolError("a frame of more than 16 KiB", FRAME_SIZE_ERROR)
    if len(data) < begin + length:
        return None
    return first & 0xFF, flags, number & MAX_WINDOW_BYTES, bytes(data[begin : begin + length])


@dataclass(frozen=True, slots=True)
class HeaderBlock:
    """Stream id, flags of HEADERS, decoded entries, and encoded size in bytes."""

    stream: int
    flags: int
    headers: Headers
    size: int


class HeaderBlocks:
    """Joins and decodes the header blocks that a connection receives in HEADERS and CONTINUATION."""

    def __init__(self) -> None:
        self._decoder = Decoder(MAX_BLOCK_BYTES)
        # Incomplete block: stream id, flags and bytes so far.
        self._block: tuple[int, int, bytearray] | None = None

    def require_no_gap(self, kind: int) -> None:
        """Raise ProtocolError for a frame of another kind within a block."""
        if self._block is not None and kind != CONTINUATION:
            raise ProtocolError("a frame within a header block")

    def add(self, kind: int, flags: int, number: int, payload: bytes) -> HeaderBlock | None:
        """The block that a HEADERS or CONTINUATION frame completes; None if it completes none.

        Raises:
            ProtocolError: the frame continues no block, or the block is too long or cannot be decoded.
        """
        if kind == HEADERS:
            self._block = (number, flags, bytearray(without_padding(HEADERS, flags, payload)))
        elif self._block is None or self._block[0] != number:
            raise ProtocolError("CONTINUATION of no header block")
        else:
            self._block[2].extend(payload)
        number, first_flags, block = self._block
        if len(block) > MAX_BLOCK_BYTES:
            raise ProtocolError("a header block of more than 128 KiB", ENHANCE_YOUR_CALM)
        if not flags & END_HEADERS:
            return None
        self._block = None
        try:
            headers = [(bytes(name), bytes(value)) for name, value, *_ in self._decoder.decode(bytes(block), raw=True)]
        except (HPACKError, IndexError, ValueError, OverflowError) as error:
            raise ProtocolError(f"a header block that cannot be read: {error}", COMPRESSION_ERROR) from error
        return HeaderBlock(number, first_flags, headers, len(block))


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return HEAD.pack(len(payload) << 8 | kind, flags, stream) + payload


def reset(stream: int, code: int) -> bytes:
    """RST_STREAM."""
    return frame(RST_STREAM, 0, stream, NUMBER.pack(code))


def window_update(stream: int, num_bytes: int) -> bytes:
    """WINDOW_UPDATE; empty for 0 bytes, which HTTP/2 forbids."""
    return frame(WINDOW_UPDATE, 0, stream, NUMBER.pack(num_bytes)) if num_bytes else b""


def goaway(last_stream: int, code: int) -> bytes:
    """GOAWAY."""
    return frame(GOAWAY, 0, 0, NUMBER.pack(last_stream) + NUMBER.pack(code))


def parse_settings(payload: bytes) -> dict[int, int]:
    """Settings by number.

    Raises:
        ProtocolError: the payload has a partial setting.
    """
    if len(payload) % _SETTING.size:
        raise ProtocolError("a SETTINGS frame of another size", FRAME_SIZE_ERROR)
    return dict(_SETTING.iter_unpack(payload))


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*value) for value in values))


def without_padding(kind: int, flags: int, payload: bytes) -> bytes:
    """Content of a DATA or HEADERS frame, without padding and priority.

    Raises:
        ProtocolError: padding exceeds the payload.
    """
    first, last = 0, len(payload)
    if flags & PADDED:
        if not payload:
            raise ProtocolError("padding without its length")
        first, last = 1, len(payload) - payload[0]
    if kind == HEADERS and flags & HAS_PRIORITY:
        first += 5
    if first > last:
        raise ProtocolError("more padding than payload")
    return payload[first:last]


def header_frames(stream: int, headers: Headers, *, ends_stream: bool) -> bytes:
    """HEADERS, and CONTINUATION if needed. The block does not use the dynamic table."""
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)
    parts = [block[first : first + MAX_FRAME_BYTES] for first in range(0, len(block), MAX_FRAME_BYTES)]
    frames = []
    for number, part in enumerate(parts):
        flags = (END_STREAM if ends_stream and number == 0 else 0) | (END_HEADERS if number == len(parts) - 1 else 0)
        frames.append(frame(CONTINUATION if number else HEADERS, flags, stream, part))
    return b"".join(frames)


def _text(text: bytes) -> bytes:
    """String literal without Huffman coding, with its length as an integer with a 7-bit prefix (RFC 7541, 5.1, 5.2)."""
    length = len(text)
    if length < 0x7F:
        return bytes((length,)) + text
    rest, length = [], length - 0x7F
    while length >= 0x80:
        rest.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes((0x7F, *rest, length)) + text
