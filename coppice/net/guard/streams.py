"""State of one call in the guard."""

from __future__ import annotations

import contextlib
import copy

from coppice.net.frames import END_STREAM, HEADERS, Headers, without_padding

# Prefix of a gRPC message: compression flag and length.
PREFIX_BYTES = 5
# Bytes above which a message is charged as large.
SMALL_BYTES = 4096


class MessageTooLargeError(Exception):
    """A message's declared length exceeds its method's limit."""


class Messages:
    """Tracks the messages of one call by their lengths."""

    __slots__ = ("_left", "_prefix", "max_bytes", "num_begun", "num_complete", "num_large_bytes", "size")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_begun = self.num_complete = self.num_large_bytes = 0
        # Length of the message under way; 0 between messages.
        self.size = 0
        self._prefix = b""
        self._left = 0

    def large_bytes(self, data: bytes) -> int:
        """Bytes of large messages in the next `data`, which is not consumed."""
        if self.size > SMALL_BYTES:
            # Without a look at what may follow it.
            return len(data)
        if len(data) <= SMALL_BYTES:
            # At most the beginning of one.
            return 0
        trial = copy.copy(self)
        with contextlib.suppress(MessageTooLargeError):
            trial.add(data)
        return trial.num_large_bytes - self.num_large_bytes

    def add(self, data: bytes) -> None:
        """Consume the next bytes of the call.

        Raises:
            MessageTooLargeError: a message of more than `max_bytes` begins.
        """
        at, end = 0, len(data)
        while at < end:
            if self._left:
                step = min(self._left, end - at)
                self._left -= step
                at += step
                if self.size > SMALL_BYTES:
                    self.num_large_bytes += step
            else:
                if not self._prefix:
                    self.num_begun += 1
                missing = PREFIX_BYTES - len(self._prefix)
                self._prefix += data[at : at + missing]
                at += missing
                if len(self._prefix) < PREFIX_BYTES:
                    return
                self.size = self._left = int.from_bytes(self._prefix[1:], "big")
                self._prefix = b""
                if self.size > self.max_bytes:
                    raise MessageTooLargeError
            if not self._left:
                self.size = 0
                self.num_complete += 1


class HttpStream:
    """A call from HEADERS to its end. `upstream` is its stream id towards the server; 0 while held."""

    __slots__ = (
        "client_ended",
        "credit",
        "deadline_s",
        "frames",
        "headers",
        "is_ours",
        "is_streaming",
        "is_unary",
        "messages",
        "num_held",
        "opened_s",
        "reserved",
        "server_ended",
        "upstream",
        "window",
    )

    def __init__(self, headers: Headers, messages: Messages, window: int, opened_s: float, deadline_s: float) -> None:
        """The first message must be complete by `deadline_s`."""
        self.headers: Headers | None = headers
        self.messages = messages
        # The client's receive window, tracked while the call is held.
        self.window = window
        # WINDOW_UPDATEs received meanwhile.
        self.credit = 0
        self.opened_s = opened_s
        self.deadline_s = deadline_s
        self.upstream = 0
        # Forwarded before its first message; limited to a single message.
        self.is_streaming = self.is_unary = False
        # Whether the method is ours, not health or reflection.
        self.is_ours = True
        self.client_ended = self.server_ended = False
        # Held DATA frames (flags, payload), and their payload bytes.
        self.frames: list[tuple[int, bytes]] = []
        self.num_held = 0
        # Bytes of room taken by a large first message.
        self.reserved = 0

    def hold(self, flags: int, payload: bytes) -> None:
        """Keep a DATA frame until the call is forwarded."""
        self.frames.append((flags, payload))
        self.num_held += len(payload)
        self.client_ended = bool(flags & END_STREAM)


def content(kind: int, flags: int, payload: bytes) -> bytes:
    """Content of a frame; most have no padding."""
    return without_padding(kind, flags, payload) if flags & 0x28 or kind == HEADERS else payload
