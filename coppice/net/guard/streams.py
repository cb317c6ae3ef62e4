"""One call as the guard sees it: held until its first message is complete, then passed on."""

from __future__ import annotations

from coppice.net.guard.frames import END_STREAM, HEADERS, Headers, without_padding

# A gRPC message comes after a byte that says whether it is compressed, and four of its length.
PREFIX_BYTES = 5
# Bytes of a message beyond these are counted as those of a large one.
SMALL_BYTES = 4096


class MessageTooLargeError(Exception):
    """A message is declared to be larger than its method's may be."""


class Messages:
    """Follows the messages of one call by their lengths."""

    __slots__ = ("_left", "_prefix", "max_bytes", "num_begun", "num_complete", "num_large_bytes", "size")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_begun = self.num_complete = self.num_large_bytes = 0
        # Bytes of the message that is coming in; 0 between messages.
        self.size = 0
        self._prefix = b""
        self._left = 0

    def add(self, data: bytes) -> None:
        """The next bytes of the call.

        Raises:
            MessageTooLargeError: they begin a message of more than `max_bytes`.
        """
        at, end = 0, len(data)
        while at < end:
            if self._left:
                step = min(self._left, end - at)
                self._left -= step
                at += step
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
                self.num_large_bytes += max(0, self.size - SMALL_BYTES)
            if not self._left:
                self.size = 0
                self.num_complete += 1


class HttpStream:
    """A call, from its HEADERS to its end. `upstream` is its number on the way to the server; 0 while it is held."""

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
        """The first message has to be complete at `deadline_s`."""
        self.headers: Headers | None = headers
        self.messages = messages
        # Bytes that the client takes before it grants more, as far as they matter: while the call is held.
        self.window = window
        # WINDOW_UPDATEs that came meanwhile.
        self.credit = 0
        self.opened_s = opened_s
        self.deadline_s = deadline_s
        self.upstream = 0
        # Passed on before its first message; and whether there is one message alone.
        self.is_streaming = self.is_unary = False
        # One of our own methods, not of health or reflection.
        self.is_ours = True
        self.client_ended = self.server_ended = False
        # DATA frames that are held: flags and payload; and bytes of these.
        self.frames: list[tuple[int, bytes]] = []
        self.num_held = 0
        # Bytes of a large first message for which there is room on the server's side.
        self.reserved = 0

    def hold(self, flags: int, payload: bytes) -> None:
        """Keep a DATA frame until the call is passed on."""
        self.frames.append((flags, payload))
        self.num_held += len(payload)
        self.client_ended = bool(flags & END_STREAM)


def content(kind: int, flags: int, payload: bytes) -> bytes:
    """What a frame carries; most have no padding."""
    return without_padding(kind, flags, payload) if flags & 0x28 or kind == HEADERS else payload
