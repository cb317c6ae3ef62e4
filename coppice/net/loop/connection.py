"""The HTTP/2 connection of a loop channel."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, cast

import grpc

from coppice.net import frames
from coppice.net.frames import (
    ACK,
    CANCEL,
    CONTINUATION,
    DATA,
    END_STREAM,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEAD_BYTES,
    HEADERS,
    MAX_FRAME_BYTES,
    MAX_WINDOW_BYTES,
    NUMBER,
    PING,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ProtocolError,
)
from coppice.net.loop.call import LoopCall

logger = logging.getLogger(__name__)

AnyCall = LoopCall[Any]
# Of all calls together; each call's own bounds what is unread, so this one is given back at once.
_WINDOW_BYTES = 1 << 20
# Given back in pieces of at least this.
_LEAST_UPDATE_BYTES = 16 * 1024
# Before the server has named its own number.
_FIRST_MAX_CALLS = 100
# A client may have this share of the places, and this many calls besides one of each of its connections: others wait
# here, where its connections take turns, and not at the server.
_CLIENT_SHARE = 0.75
_MORE_CALLS = 64
_PING = b"coppice\0"
_CODES = {
    CANCEL: grpc.StatusCode.CANCELLED,
    frames.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class LoopConnection(asyncio.Protocol):
    """A connection to a server. `changed` is called when it takes more calls than before, or none.

    `again` gets calls that the server has not looked at, and its reason.
    """

    def __init__(
        self, changed: Callable[[], object], again: Callable[[AnyCall, str], object], silence_s: float, answer_s: float
    ) -> None:
        """After `silence_s` without a word the server is asked for one, and lost after `answer_s` more."""
        self._changed = changed
        self._again = again
        self._silence_s = silence_s
        self._answer_s = answer_s
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._calls: dict[int, AnyCall] = {}
        # Calls by client, by its connections, and those besides the first of a connection by client.
        self._counts: Counter[str] = Counter()
        self._of_connections: Counter[tuple[str, str]] = Counter()
        self._more: Counter[str] = Counter()
        # Clients with a call that is not sent yet.
        self._sending: set[str] = set()
        self._next = 1
        self._max_calls = _FIRST_MAX_CALLS
        # Set by the server's settings, and by the end.
        self._greeted = asyncio.Event()
        self._is_leaving = False
        self._inbound = bytearray()
        self._blocks = frames.HeaderBlocks()
        self._owed = 0
        # What may be sent: of all calls, and at first of a new one.
        self._window = self._first_window = frames.DEFAULT_WINDOW_BYTES
        # Calls whose request is not sent, with their numbers, in the order of their turns.
        self._unsent: dict[AnyCall, int] = {}
        self._heard_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether new calls may be begun here, now or when others have ended."""
        return self._transport is not None and not self._is_leaving

    @property
    def is_lost(self) -> bool:
        """Whether it has ended."""
        return self._transport is None

    def may_begin(self, client: str, connection: str) -> bool:
        """Whether one more call of a client's connection may be begun now: it has a place, and its last one is sent."""
        if not self.is_open or len(self._calls) >= self._max_calls or client in self._sending:
            return False
        if self._of_connections[client, connection] and self._more[client] >= _MORE_CALLS:
            return False
        return self._counts[client] < max(1, _CLIENT_SHARE * self._max_calls)

    async def greeted(self) -> None:
        """Wait for the server's settings: what takes connections may yet be no server.

        Raises:
            ConnectionError: the connection has ended before.
        """
        await self._greeted.wait()
        if self.is_lost:
            raise ConnectionError("the connection was closed at once")

    def begin(self, call: AnyCall) -> None:
        """Send a call."""
        number, self._next = self._next, self._next + 2
        self._calls[number] = call
        self._counts[call.client] += 1
        self._more[call.client] += (call.client, call.connection) in self._of_connections
        self._of_connections[call.client, call.connection] += 1
        call.begin(self._first_window)
        call.on_cancel = lambda: self._cancelled(number)
        call.on_room = lambda: self._return_window(number, call)
        self._unsent[call] = number
        self._sending.add(call.client)
        self._write(frames.header_frames(number, call.headers, ends_stream=False))
        while self._send_part(number, call):
            pass

    def close(self) -> None:
        """End the connection and its calls."""
        if self._transport is not None:
            self._transport.abort()
        self._lost("the channel is closed")

    # Of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the server."""
        self._transport = cast(asyncio.Transport, transport)
        window = frames.window_update(0, _WINDOW_BYTES - frames.DEFAULT_WINDOW_BYTES)
        self._write(frames.PREFACE + frames.settings([(frames.SETTINGS_ENABLE_PUSH, 0)]) + window)
        self._timer = self._loop.call_later(self._silence_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the calls."""
        self._lost(f"the connection is lost: {exc or 'closed by the server'}")

    def data_received(self, data: bytes) -> None:
        """Read complete frames."""
        self._heard_s = self._loop.time()
        inbound = self._inbound
        inbound += data
        at = 0
        try:
            while self._transport is not None and (found := frames.read_frame(inbound, at)) is not None:
                kind, flags, number, payload = found
                at += HEAD_BYTES + len(payload)
                self._read(kind, flags, number, payload)
        except ProtocolError as error:
            self._write(frames.goaway(0, error.code))
            self._hang_up(f"the server does not speak HTTP/2: {error}")
        del inbound[:at]

    # Frames.

    def _read(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        self._blocks.require_no_gap(kind)
        if kind == DATA:
            self._data(number, flags, payload)
        elif kind in (HEADERS, CONTINUATION):
            self._header_frame(kind, number, flags, payload)
        elif kind == WINDOW_UPDATE:
            self._window_update(number, _number(payload))
        elif kind == RST_STREAM:
            self._reset(number, _number(payload))
        elif kind == SETTINGS and not flags & ACK:
            self._settings(frames.parse_settings(payload))
        elif kind == PING and not flags & ACK:
            self._write(frames.frame(PING, ACK, 0, payload))
        elif kind == GOAWAY:
            self._leave(_number(payload[: NUMBER.size]))
        # PRIORITY, unknown frames and answers to our own are dropped.

    def _data(self, number: int, flags: int, payload: bytes) -> None:
        self._owed += len(payload)
        if self._owed >= _LEAST_UPDATE_BYTES:
            self._write(frames.window_update(0, self._owed))
            self._owed = 0
        if (call := self._calls.get(number)) is None:
            return  # cancelled
        call.receive(frames.without_padding(DATA, flags, payload))
        call.owed += len(payload)
        if flags & END_STREAM:
            self._forget(number).finish([])
        elif call.has_room:
            self._return_window(number, call)

    def _header_frame(self, kind: int, number: int, flags: int, payload: bytes) -> None:
        block = self._blocks.add(kind, flags, number, payload)
        if block is None or number not in self._calls:
            return
        if block.flags & END_STREAM:
            self._forget(number).finish(block.headers)
        elif (b":status", b"200") not in block.headers:
            # No gRPC server, and its body no message.
            call = self._calls[number]
            self._cancelled(number)
            call.finish(block.headers)

    def _window_update(self, number: int, num_bytes: int) -> None:
        if number == 0:
            self._window += num_bytes
        elif (call := self._calls.get(number)) is not None:
            call.window += num_bytes
        self._go_on()

    def _reset(self, number: int, code: int) -> None:
        if number not in self._calls:
            return
        call = self._forget(number)
        if code == REFUSED_STREAM:
            self._again(call, "the server has refused the call")
            return
        call.fail(_CODES.get(code, grpc.StatusCode.INTERNAL), f"the server has reset the call: HTTP/2 error {code}")

    def _settings(self, values: dict[int, int]) -> None:
        self._max_calls = values.get(frames.SETTINGS_MAX_CONCURRENT_STREAMS, self._max_calls)
        first = values.get(frames.SETTINGS_INITIAL_WINDOW_SIZE, self._first_window)
        for call in self._calls.values():
            call.window += first - self._first_window
        self._first_window = first
        self._write(frames.frame(SETTINGS, ACK, 0))
        self._greeted.set()
        self._go_on()
        self._changed()

    def _leave(self, last: int) -> None:
        """The server takes no more calls, and has not looked at those after `last`."""
        self._is_leaving = True
        for number in [number for number in self._calls if number > last]:
            self._again(self._forget(number), "the server is stopping")
        self._changed()

    # Sending.

    def _go_on(self) -> None:
        """Send what the windows have room for, a frame of each call in turn."""
        turns = deque(self._unsent.items())
        while turns:
            call, number = turns.popleft()
            if self._send_part(number, call):
                turns.append((call, number))

    def _send_part(self, number: int, call: AnyCall) -> bool:
        """Send a frame of a call's request, as far as the windows go; whether there may be another."""
        size = min(len(call.unsent), MAX_FRAME_BYTES, self._window, call.window)
        if size <= 0:
            return False
        part, call.unsent = call.unsent[:size], call.unsent[size:]
        self._window -= size
        call.window -= size
        self._write(frames.frame(DATA, 0 if call.unsent else END_STREAM, number, bytes(part)))
        del self._unsent[call]
        if call.unsent:
            self._unsent[call] = number
        else:
            self._sent(call)
        return bool(call.unsent)

    def _sent(self, call: AnyCall) -> None:
        """Let the client's next call begin."""
        call.unsent = memoryview(b"")
        self._sending.discard(call.client)
        self._loop.call_soon(self._changed)

    def _return_window(self, number: int, call: AnyCall) -> None:
        if call.owed >= _LEAST_UPDATE_BYTES and number in self._calls:
            self._write(frames.window_update(number, call.owed))
            call.owed = 0

    def _write(self, data: bytes) -> None:
        if data and self._transport is not None:
            self._transport.write(data)

    # Ends.

    def _cancelled(self, number: int) -> None:
        if number in self._calls:
            self._forget(number)
            self._write(frames.reset(number, CANCEL))

    def _forget(self, number: int) -> AnyCall:
        call = self._calls.pop(number)
        self._counts[call.client] -= 1
        self._of_connections[call.client, call.connection] -= 1
        if self._of_connections[call.client, call.connection]:
            self._more[call.client] -= 1
        else:
            del self._of_connections[call.client, call.connection]
        if not self._counts[call.client]:
            del self._counts[call.client], self._more[call.client]
        if self._unsent.pop(call, None) is not None:
            self._sending.discard(call.client)
        if self._is_leaving and not self._calls:
            self._hang_up("the server is stopping")
        else:
            self._loop.call_soon(self._changed)
        return call

    def _look(self) -> None:
        """Ask a silent server for a word; hang up if there is none."""
        silent_s = self._loop.time() - self._heard_s
        if silent_s >= self._silence_s + self._answer_s:
            self._hang_up("the server is silent")
            return
        if silent_s >= self._silence_s:
            self._write(frames.frame(PING, 0, 0, _PING))
            left_s = self._silence_s + self._answer_s - silent_s
        else:
            left_s = self._silence_s - silent_s
        self._timer = self._loop.call_later(max(left_s, 0.001), self._look)

    def _hang_up(self, reason: str) -> None:
        if self._transport is not None:
            self._transport.close()
        self._lost(reason)

    def _lost(self, reason: str) -> None:
        if self._transport is None:
            return
        self._transport = None
        self._greeted.set()
        if self._timer is not None:
            self._timer.cancel()
        calls, self._calls, self._unsent = list(self._calls.values()), {}, {}
        for call in calls:
            call.fail(grpc.StatusCode.UNAVAILABLE, reason)
        self._changed()


def _number(payload: bytes) -> int:
    if len(payload) != NUMBER.size:
        raise ProtocolError("a frame of another size", FRAME_SIZE_ERROR)
    number: int = NUMBER.unpack(payload)[0]
    return number & MAX_WINDOW_BYTES
