"""DATA that the guard forwards stays within the server's window, whatever the client was granted."""

from __future__ import annotations

import pytest

from coppice.net import frames
from coppice.net.guard.calls import Calls
from coppice.net.guard.client_frames import ClientFrames
from coppice.net.guard.limits import GuardLimits, Room
from coppice.net.guard.pending import PendingCalls
from coppice.net.guard.server_frames import ServerFrames
from coppice.net.guard.turnstile import Turnstile
from tests.raw_http2 import frame
from tests.unit.coppice.net.guard.test_guard import data, message, opened

LIMITS = GuardLimits(1 << 20, 64)
WHOLE = message(b"x" * 30_000)
# Of a call, held until its last byte is there.
PARTS = WHOLE[:16_000], WHOLE[16_000:-1], WHOLE[-1:]


class Between:
    """A guard's connection without sockets."""

    def __init__(self) -> None:
        self.to_client: list[bytes] = []
        self.to_server: list[bytes] = []
        self.room = Room(LIMITS)
        turnstile = Turnstile()
        account = turnstile.open("127.0.0.1", lambda: None)
        self.calls = Calls(
            "127.0.0.1:1", LIMITS, self.room, PendingCalls(), self.to_client.append, self.to_server.append
        )
        self._client = ClientFrames(self.calls, LIMITS, turnstile, account)
        self._server = ServerFrames(self.calls)

    def from_client(self, *parts: bytes) -> None:
        assert self._client.read(bytearray(b"".join(parts)))

    def from_server(self, *parts: bytes) -> None:
        self._server.read(bytearray(b"".join(parts)))

    def sent(self, kind: int, *, to_server: bool = True) -> list[tuple[int, int, bytes]]:
        """Stream, flags and payload of every frame of a kind so far."""
        received = bytearray(b"".join(self.to_server if to_server else self.to_client))
        found, at = [], 0
        while (one := frames.read_frame(received, at)) is not None:
            at += frames.HEAD_BYTES + len(one[3])
            if one[0] == kind:
                found.append((one[2], one[1], one[3]))
        return found

    def text_of(self, stream: int) -> bytes:
        return b"".join(payload for number, _, payload in self.sent(frames.DATA) if number == stream)

    def num_sent(self) -> int:
        return sum(len(payload) for _, _, payload in self.sent(frames.DATA))


@pytest.fixture
async def full() -> Between:
    """Ten calls of 30,000 bytes that were complete at once, more than four windows of the server."""
    between = Between()
    streams = range(1, 21, 2)
    for stream in streams:
        between.from_client(opened(stream), *(data(stream, part, ends=False) for part in PARTS[:2]))
    assert between.num_sent() == 0
    for stream in streams:
        between.from_client(data(stream, PARTS[2]))
    return between


async def test_calls_that_are_complete_at_once_wait_for_the_servers_window(full: Between) -> None:
    assert 0 < full.num_sent() <= frames.DEFAULT_WINDOW_BYTES
    # As many bytes as the server has taken, until it has all.
    window, taken = frames.DEFAULT_WINDOW_BYTES, 0
    while full.num_sent() > taken:
        step, taken = full.num_sent() - taken, full.num_sent()
        full.from_server(frames.window_update(0, step))
        assert full.num_sent() - taken <= window
    assert taken == 10 * len(WHOLE)
    assert all(full.text_of(stream) == WHOLE for stream in range(1, 21, 2))
    ends = [number for number, flags, _ in full.sent(frames.DATA) if flags & frames.END_STREAM]
    assert sorted(ends) == list(range(1, 21, 2))
    # The client had its window back when the bytes were held, and does not get it twice.
    granted = sum(int.from_bytes(payload, "big") for _, _, payload in full.sent(frames.WINDOW_UPDATE, to_server=False))
    assert granted == 10 * len(WHOLE)


async def test_a_small_call_does_not_wait_for_all_of_the_others(full: Between) -> None:
    full.from_client(opened(21), data(21, message(b"small")))
    assert full.text_of(21) == b""
    # Calls take turns: a frame of each.
    full.from_server(frames.window_update(0, 150_000))
    assert full.text_of(21) == message(b"small")
    assert full.num_sent() < 9 * len(WHOLE)


async def test_what_waits_is_dropped_with_its_call_and_counted_no_more(full: Between) -> None:
    for stream in range(1, 21, 2):
        full.from_client(frames.reset(stream, frames.CANCEL))
    before = full.num_sent()
    full.from_server(frames.window_update(0, 1 << 20))
    assert full.num_sent() == before
    assert {number for number, *_ in full.sent(frames.RST_STREAM)} == set(range(1, 21, 2))
    assert full.room._held == {}
    assert full.calls.streams == {}


async def test_a_call_that_the_server_ended_early_is_ended_there_too(full: Between) -> None:
    # Trailers of the last call, of which nothing has been sent.
    assert full.text_of(19) == b""
    full.from_server(frame(frames.HEADERS, frames.END_STREAM | frames.END_HEADERS, 19, b"\x88"))
    assert 19 in {number for number, *_ in full.sent(frames.RST_STREAM)}
    full.from_server(frames.window_update(0, 1 << 20))
    assert full.text_of(19) == b""
    assert full.text_of(17) == WHOLE
