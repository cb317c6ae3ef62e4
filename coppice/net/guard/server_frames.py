"""Server side of a connection: frames are forwarded with the client's stream ids.

The server's header blocks do not use the dynamic table, so any of them may be dropped.
"""

from __future__ import annotations

from coppice.net import frames
from coppice.net.frames import (
    ACK,
    DATA,
    END_STREAM,
    GOAWAY,
    HEAD,
    HEAD_BYTES,
    HEADERS,
    MAX_WINDOW_BYTES,
    NUMBER,
    PING,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
)
from coppice.net.guard.calls import Calls


class ServerFrames:
    """Reads the server's frames."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def read(self, outbound: bytearray) -> None:
        """Forward and consume the complete frames of `outbound`."""
        # Frames up to `at` are processed; those from `start` on are forwarded unchanged.
        at = start = 0
        out: list[bytes] = []
        refused = 0
        while len(outbound) - at >= HEAD_BYTES:
            first, flags, number = HEAD.unpack_from(outbound, at)
            length, kind = first >> 8, first & 0xFF
            after = at + HEAD_BYTES + length
            if len(outbound) < after:
                break
            client_number = self._calls.by_upstream.get(number) if number else None
            if client_number != number and kind != PING:
                out.append(bytes(outbound[start:at]))
                start = after
                payload = bytes(outbound[at + HEAD_BYTES : after])
                if not number:
                    out.append(self._of_connection(kind, flags, payload))
                elif client_number is None:
                    # The client has cancelled the call.
                    refused += length if kind == DATA else 0
                else:
                    out += (HEAD.pack(first, flags, client_number), payload)
            at = after
            is_last = kind == RST_STREAM or (flags & END_STREAM and kind in (DATA, HEADERS))
            if is_last and client_number is not None:
                self._server_ended(client_number, is_reset=kind == RST_STREAM)
        out.append(bytes(outbound[start:at]))
        del outbound[:at]
        self._calls.to_client(b"".join(out))
        self._calls.to_server(frames.window_update(0, refused))

    def _of_connection(self, kind: int, flags: int, payload: bytes) -> bytes:
        """The client's form of a connection-level frame of the server."""
        if kind == SETTINGS and not flags & ACK:
            values = frames.parse_settings(payload)
            # The guard's own settings apply to the client.
            for ours in (frames.SETTINGS_HEADER_TABLE_SIZE, frames.SETTINGS_MAX_FRAME_SIZE):
                values.pop(ours, None)
            return frames.settings(values.items())
        if kind == GOAWAY:
            return self._goaway(payload)
        if kind == WINDOW_UPDATE:
            (amount,) = NUMBER.unpack(payload)
            return frames.window_update(0, self._calls.grant(amount))
        return frames.frame(kind, flags, 0, payload)

    def _goaway(self, payload: bytes) -> bytes:
        """GOAWAY with the client's id of the last call that the server accepts; held calls are refused."""
        (last,) = NUMBER.unpack_from(payload)
        if last == MAX_WINDOW_BYTES:
            return frames.frame(GOAWAY, 0, 0, payload)
        held = [number for number, stream in self._calls.streams.items() if not stream.upstream]
        taken = [number for upstream, number in self._calls.by_upstream.items() if upstream <= last]
        resets = b"".join(frames.reset(number, REFUSED_STREAM) for number in held)
        for number in held:
            self._calls.forget(number)
        last = max([*taken, *held], default=self._calls.last_stream)
        return resets + frames.frame(GOAWAY, 0, 0, NUMBER.pack(last) + payload[NUMBER.size :])

    def _server_ended(self, number: int, *, is_reset: bool) -> None:
        stream = self._calls.streams[number]
        stream.server_ended = True
        if is_reset or stream.client_ended:
            self._calls.forget(number)
