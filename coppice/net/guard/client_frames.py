"""Client side of a connection: frames are read, checked, charged, and forwarded as calls.

Header blocks are decoded and re-encoded. Flow control of streams is end to end. Of the connection, the guard returns
the window of DATA that it holds or drops, and keeps within the server's (`Calls`).
"""

from __future__ import annotations

import asyncio
import re

from coppice.net import frames
from coppice.net.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEAD_BYTES,
    HEADERS,
    MAX_WINDOW_BYTES,
    NUMBER,
    PING,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ProtocolError,
)
from coppice.net.guard.calls import Calls
from coppice.net.guard.limits import GuardLimits
from coppice.net.guard.pending import PEER_KEY
from coppice.net.guard.streams import HttpStream, Messages, MessageTooLargeError, content
from coppice.net.guard.turnstile import TURN_UNITS, HostAccount, Turnstile

_PEER = PEER_KEY.encode()
# Method names: gRPC decodes them as UTF-8 in the task that accepts calls.
_METHOD = re.compile(rb"/[!-~]{1,255}")
# Metadata that gRPC accepts: it decodes all as text, except values of keys that end in "-bin".
_NAME = re.compile(rb":?[0-9a-z_.-]+")
_TEXT = re.compile(rb"[ -~]*")
# Size limit for foreign methods (health, reflection).
OTHER_MESSAGE_BYTES = 65536
OURS = b"/coppice."
# Cost by kind of frame in units of work (turnstile.py) of about 50 microseconds, charged before a frame is read.
_UNITS = {HEADERS: 3.0, CONTINUATION: 1.0, SETTINGS: 0.5, PING: 0.3, RST_STREAM: 0.3, PRIORITY: 0.3, WINDOW_UPDATE: 0.1}
_EMPTY_UNITS = 0.3
_DATA_UNITS = 0.1
_OTHER_UNITS = 0.3
# Cost of payload bytes, of DATA without a call, and of messages of a streaming call.
_UNITS_PER_BYTE = {SETTINGS: 2e-3}
_OTHER_UNITS_PER_BYTE = 1 / 65536
_LOST_DATA_UNITS = 1.0
_MESSAGE_UNITS = 0.1
_FREE_MESSAGES = 4
# Cost per byte of a large message (streams.py) of a streaming call: the server parses it before any check. Charged
# before a frame is read, so that the sender waits, and others do not find the shared budget spent.
_LARGE_BYTE_UNITS = 1 / 16384
# Cost of a header block's entries and bytes, charged after decoding.
_ENTRY_UNITS = 0.05
_BYTE_UNITS = 0.002
# Size limit of a call's metadata as HTTP/2 counts it, with 32 bytes of overhead per entry.
MAX_METADATA_BYTES = 16384
_ENTRY_BYTES = 32
_INVALID_ARGUMENT, _RESOURCE_EXHAUSTED = 3, 8


class ClientFrames:
    """Reads the client's frames after the preface; `account` pays for them."""

    def __init__(self, calls: Calls, limits: GuardLimits, turnstile: Turnstile, account: HostAccount) -> None:
        self._calls = calls
        self._limits = limits
        self._turnstile = turnstile
        self._account = account
        self._loop = asyncio.get_running_loop()
        self._blocks = frames.HeaderBlocks()
        # Units paid for the next frame, which may cost more than one turn.
        self._paid = 0.0
        # Initial window of streams in the client's SETTINGS.
        self._window = frames.DEFAULT_WINDOW_BYTES

    def read(self, inbound: bytearray) -> bool:
        """Consume complete frames of `inbound`, as far as the connection's budget goes.

        Returns:
            False if the connection must wait for its turn.

        Raises:
            ProtocolError: the connection must be closed.
        """
        at = 0
        out: list[bytes] = []
        try:
            while (found := frames.read_frame(inbound, at)) is not None:
                kind, flags, number, payload = found
                if not self._pay(kind, flags, number, payload):
                    return False
                at += HEAD_BYTES + len(payload)
                self._blocks.require_no_gap(kind)
                if kind == DATA:
                    self._data(number, flags, payload, out)
                else:
                    self._other_frame(kind, flags, number, payload, out)
            return True
        finally:
            del inbound[:at]
            self._calls.to_server(b"".join(out))

    def _pay(self, kind: int, flags: int, number: int, payload: bytes) -> bool:
        """Whether the next frame is paid for; if not, the connection must wait."""
        units = _units(kind, flags, len(payload))
        if kind == DATA and (stream := self._calls.streams.get(number)) is not None and stream.is_streaming:
            units += _LARGE_BYTE_UNITS * stream.messages.large_bytes(content(kind, flags, payload))
        # Frames that may complete a call also wait while the server has many pending.
        passes_calls = kind in (HEADERS, CONTINUATION, DATA)
        while self._paid < units:
            part = min(units - self._paid, TURN_UNITS)
            if not self._turnstile.take(self._account, part, passes_calls=passes_calls):
                return False
            self._paid += part
        self._paid = 0.0
        return True

    def _other_frame(self, kind: int, flags: int, number: int, payload: bytes, out: list[bytes]) -> None:
        if kind in (HEADERS, CONTINUATION):
            self._header_frame(kind, flags, number, payload, out)
        elif kind == RST_STREAM:
            self._reset(number, payload, out)
        elif kind == WINDOW_UPDATE:
            self._window_update(number, payload, out)
        elif kind == SETTINGS:
            self._settings(flags, payload, out)
        elif kind in (PING, GOAWAY):
            if number or (kind == PING and len(payload) != 8):
                raise ProtocolError("a malformed frame of the connection")
            out.append(frames.frame(kind, flags, 0, payload))
        elif kind == PUSH_PROMISE:
            raise ProtocolError("PUSH_PROMISE from a client")
        # PRIORITY and unknown frames are dropped.

    def _data(self, number: int, flags: int, payload: bytes, out: list[bytes]) -> None:
        stream = self._calls.streams.get(number)
        if stream is None or stream.client_ended:
            if number == 0 or number > self._calls.last_stream:
                raise ProtocolError("DATA of no stream")
            self._turnstile.charge(self._account, _LOST_DATA_UNITS)
            self._calls.give_back(len(payload))
            return
        num_before = stream.messages.num_complete
        try:
            stream.messages.add(content(DATA, flags, payload))
        except MessageTooLargeError:
            # For our methods gRPC refuses it with a status, without keeping it.
            if not stream.is_ours:
                self._calls.give_back(len(payload))
                self._calls.end(number, ENHANCE_YOUR_CALM)
                return
        if stream.is_unary and stream.messages.num_begun > 1:
            self._calls.give_back(len(payload))
            self._calls.end(number, PROTOCOL_ERROR)
            return
        if (num_messages := stream.messages.num_complete - num_before) > _FREE_MESSAGES:
            self._turnstile.charge(self._account, _MESSAGE_UNITS * num_messages)
        if stream.upstream:
            self._pass_on(number, stream, flags, payload, out)
        else:
            self._calls.hold(number, stream, flags, payload, out)

    def _pass_on(self, number: int, stream: HttpStream, flags: int, payload: bytes, out: list[bytes]) -> None:
        self._calls.pass_data(number, stream, flags, payload, out)
        if stream.reserved and stream.messages.num_complete:
            self._calls.free(stream)
            self._calls.incomplete.pop(number, None)
        if flags & END_STREAM:
            stream.client_ended = True
            self._calls.incomplete.pop(number, None)
            if stream.server_ended:
                self._calls.forget(number)

    def _header_frame(self, kind: int, flags: int, number: int, payload: bytes, out: list[bytes]) -> None:
        if kind == HEADERS and number % 2 == 0:
            raise ProtocolError("HEADERS of no stream of a client's")
        if (block := self._blocks.add(kind, flags, number, payload)) is not None:
            # Entries may refer to the dynamic table, so decoded sizes count too.
            num_bytes = max(block.size, sum(len(name) + len(value) for name, value in block.headers))
            self._turnstile.charge(self._account, _ENTRY_UNITS * len(block.headers) + _BYTE_UNITS * num_bytes)
            self._open(block, out)

    def _open(self, block: frames.HeaderBlock, out: list[bytes]) -> None:
        number, headers = block.stream, block.headers
        if number <= self._calls.last_stream:
            # Trailers, which gRPC clients do not send.
            if number in self._calls.streams:
                self._calls.end(number, PROTOCOL_ERROR)
                return
            raise ProtocolError("a closed or skipped stream")
        self._calls.last_stream = number
        path = next((value for name, value in headers if name == b":path"), b"")
        if not _METHOD.fullmatch(path):
            raise ProtocolError("a method name that is not printable ASCII")
        if len(self._calls.streams) >= self._limits.max_streams:
            self._calls.to_client(frames.reset(number, REFUSED_STREAM))
            return
        if not all(_is_metadata(name, value) for name, value in headers):
            self._answer(number, _INVALID_ARGUMENT, "metadata that is not printable ASCII")
            return
        if sum(len(name) + len(value) + _ENTRY_BYTES for name, value in headers) > MAX_METADATA_BYTES:
            self._answer(number, _RESOURCE_EXHAUSTED, f"metadata of more than {MAX_METADATA_BYTES} bytes")
            return
        is_ours = path.startswith(OURS)
        if not is_ours and sum(not other.is_ours for other in self._calls.streams.values()) >= self._limits.max_other:
            self._calls.to_client(frames.reset(number, REFUSED_STREAM))
            return
        most = self._limits.max_message_bytes if is_ours else OTHER_MESSAGE_BYTES
        named = [(name, value) for name, value in headers if name.lower() != _PEER]
        now_s = self._loop.time()
        deadline_s = now_s + self._limits.first_message_s
        named.append((_PEER, self._calls.peer.encode()))
        stream = HttpStream(named, Messages(most), self._window, now_s, deadline_s)
        stream.client_ended = bool(block.flags & END_STREAM)
        stream.is_ours = is_ours
        stream.is_unary = path in self._limits.unary
        if path in self._limits.streaming:
            if sum(other.is_streaming for other in self._calls.streams.values()) >= self._limits.max_streaming:
                self._calls.to_client(frames.reset(number, REFUSED_STREAM))
                return
            stream.is_streaming = True
            self._calls.streams[number] = stream
            self._calls.release(number, stream, out)
            return
        self._calls.streams[number] = self._calls.incomplete[number] = stream
        self._calls.release_if_ready(number, stream, out)

    def _answer(self, number: int, status: int, message: str) -> None:
        """Refuse a call with a gRPC status."""
        headers = [
            (b":status", b"200"),
            (b"content-type", b"application/grpc"),
            (b"grpc-status", str(status).encode()),
            (b"grpc-message", message.encode()),
        ]
        self._calls.to_client(frames.header_frames(number, headers, ends_stream=True))
        self._calls.to_client(frames.reset(number, frames.NO_ERROR))

    def _reset(self, number: int, payload: bytes, out: list[bytes]) -> None:
        if number == 0 or number > self._calls.last_stream or len(payload) != NUMBER.size:
            raise ProtocolError("RST_STREAM of no stream")
        if (stream := self._calls.streams.get(number)) is None:
            return
        if stream.upstream:
            out.append(frames.frame(RST_STREAM, 0, stream.upstream, payload))
        self._calls.forget(number)

    def _window_update(self, number: int, payload: bytes, out: list[bytes]) -> None:
        if len(payload) != NUMBER.size:
            raise ProtocolError("WINDOW_UPDATE of another size", FRAME_SIZE_ERROR)
        (amount,) = NUMBER.unpack(payload)
        amount &= MAX_WINDOW_BYTES
        if number == 0:
            out.append(frames.frame(WINDOW_UPDATE, 0, 0, payload))
            return
        if number > self._calls.last_stream:
            raise ProtocolError("WINDOW_UPDATE of no stream")
        if (stream := self._calls.streams.get(number)) is None:
            return
        if stream.upstream:
            out.append(frames.frame(WINDOW_UPDATE, 0, stream.upstream, payload))
            return
        stream.window += amount
        stream.credit += amount
        if stream.window > MAX_WINDOW_BYTES or not amount:
            self._calls.end(number, FLOW_CONTROL_ERROR)
            return
        self._calls.release_if_ready(number, stream, out)

    def _settings(self, flags: int, payload: bytes, out: list[bytes]) -> None:
        if flags & ACK:
            out.append(frames.frame(SETTINGS, ACK, 0))
            return
        values = frames.parse_settings(payload)
        window = values.get(frames.SETTINGS_INITIAL_WINDOW_SIZE, self._window)
        if window > MAX_WINDOW_BYTES:
            raise ProtocolError("a window of more than 2 GiB", FLOW_CONTROL_ERROR)
        change, self._window = window - self._window, window
        if not self._calls.streams:
            change = 0
        # The server uses no dynamic header table, and frames of the default size.
        values.pop(frames.SETTINGS_MAX_FRAME_SIZE, None)
        values[frames.SETTINGS_HEADER_TABLE_SIZE] = 0
        out.append(frames.settings(values.items()))
        for number, stream in list(self._calls.incomplete.items()) if change else ():
            if not stream.upstream:
                stream.window += change
                self._calls.release_if_ready(number, stream, out)


def _is_metadata(name: bytes, value: bytes) -> bool:
    return bool(_NAME.fullmatch(name) and (name.endswith(b"-bin") or _TEXT.fullmatch(value)))


def _units(kind: int, flags: int, length: int) -> float:
    if kind == DATA:
        of_frame = _DATA_UNITS if length or flags & END_STREAM else _EMPTY_UNITS
    else:
        of_frame = _UNITS.get(kind, _OTHER_UNITS)
    return of_frame + length * _UNITS_PER_BYTE.get(kind, _OTHER_UNITS_PER_BYTE)
