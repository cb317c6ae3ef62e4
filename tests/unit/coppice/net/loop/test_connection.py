"""The connection of a loop channel and servers that send what gRPC's own do not, frame by frame."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, cast

import grpc
import pytest

from coppice.net import frames
from coppice.net.frames import ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, NUMBER, PING, SETTINGS
from coppice.net.loop.call import UNREAD_BYTES, LoopCall
from coppice.net.loop.connection import LoopConnection
from tests.raw_http2 import Header, header_block

OK: list[Header] = [(b":status", b"200"), (b"content-type", b"application/grpc")]
FIRST = 1


class Wire:
    """The transport of a connection: what was written, and whether it has ended."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def take(self) -> list[tuple[int, int, int, bytes]]:
        """Kind, flags, stream and payload of frames since the last time."""
        data, taken = bytes(self.written), []
        self.written.clear()
        data = data.removeprefix(frames.PREFACE)
        while data:
            first, flags, number = frames.HEAD.unpack_from(data)
            end = frames.HEAD_BYTES + (first >> 8)
            taken.append((first & 0xFF, flags, number, data[frames.HEAD_BYTES : end]))
            data = data[end:]
        return taken


class Peer:
    """A connection with one call, and the server's side by hand."""

    def __init__(self, request: bytes = b"\0\0\0\0\0") -> None:
        self.again: list[LoopCall[Any]] = []
        self.num_changes = 0
        self.connection = LoopConnection(self._changed, lambda call, _: self.again.append(call), 30.0, 10.0)
        self.wire = Wire()
        self.connection.connection_made(cast(asyncio.Transport, self.wire))
        self.call: LoopCall[bytes] = LoopCall([(b":path", b"/x")], (request,), bytes)
        self.connection.begin(self.call)

    def _changed(self) -> None:
        self.num_changes += 1

    def says(self, *parts: bytes) -> None:
        for part in parts:
            self.connection.data_received(part)

    def sent(self, kind: int) -> list[tuple[int, int, bytes]]:
        return [(flags, number, payload) for one, flags, number, payload in self.wire.take() if one == kind]

    async def error(self) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in self.call:
                pass
        return caught.value


def message(data: bytes) -> bytes:
    return b"\0" + len(data).to_bytes(4, "big") + data


def headers(fields: list[Header], *, ends: bool = False) -> bytes:
    return frames.header_frames(FIRST, fields, ends_stream=ends)


def trailers(status: bytes = b"0") -> bytes:
    return headers([(b"grpc-status", status)], ends=True)


async def test_bytes_may_be_cut_anywhere() -> None:
    whole = (
        frames.settings([])
        + headers(OK)
        + frames.frame(DATA, 0, FIRST, message(b"one") + message(b"tw")[:6])
        + frames.frame(DATA, 0, FIRST, message(b"tw")[6:])
        + trailers()
    )
    for size in (1, 2, 7, len(whole)):
        peer = Peer()
        peer.says(*(whole[at : at + size] for at in range(0, len(whole), size)))
        assert [one async for one in peer.call] == [b"one", b"tw"]


async def test_padded_frames_and_header_blocks_in_parts_are_read() -> None:
    peer = Peer()
    peer.says(headers(OK), frames.frame(DATA, frames.PADDED, FIRST, b"\3" + message(b"one") + b"\0\0\0"))
    block = header_block([(b"grpc-status", b"5"), (b"grpc-message", b"gone%21")])
    peer.says(
        frames.frame(HEADERS, END_STREAM, FIRST, block[:4]), frames.frame(CONTINUATION, END_HEADERS, FIRST, block[4:])
    )
    assert await anext(peer.call) == b"one"
    error = await peer.error()
    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "gone!")


@pytest.mark.parametrize("status", [b"9" * 5_000, b"", b"-1", b"4.0", b"\xff"])
async def test_trailers_that_are_none_of_grpc_s_fail_their_call_alone(status: bytes) -> None:
    peer = Peer()
    other: LoopCall[bytes] = LoopCall([(b":path", b"/y")], (message(b""),), bytes)
    peer.connection.begin(other)
    nonsense: list[Header] = [(b"grpc-status-details-bin", b"a"), (b"\xff", b"\xff"), (b"grpc-message", b"%ff%")]
    peer.says(headers(OK), headers([(b"grpc-status", status), *nonsense], ends=True))
    assert (await peer.error()).code() == grpc.StatusCode.UNKNOWN
    assert not other.has_ended
    assert not peer.wire.is_closed


async def test_a_request_waits_for_the_windows_of_the_connection_and_of_the_call() -> None:
    request = message(bytes(200_000))
    peer = Peer(request)
    sent = peer.sent(DATA)
    assert sum(len(payload) for *_, payload in sent) == frames.DEFAULT_WINDOW_BYTES
    peer.says(frames.window_update(0, 500_000))
    assert not peer.sent(DATA)
    peer.says(frames.settings([(frames.SETTINGS_INITIAL_WINDOW_SIZE, 100_000)]))
    sent += peer.sent(DATA)
    assert sum(len(payload) for *_, payload in sent) == 100_000
    peer.says(frames.window_update(FIRST, 500_000))
    sent += peer.sent(DATA)
    assert b"".join(payload for *_, payload in sent) == request
    assert [bool(flags & END_STREAM) for flags, *_ in sent] == [False] * (len(sent) - 1) + [True]


def call_of(client: str, request: bytes) -> LoopCall[bytes]:
    return LoopCall([(b":path", b"/x")], (request,), bytes, client)


async def test_a_client_with_much_to_send_waits_for_its_own_and_others_send_in_turn() -> None:
    peer = Peer(message(b""))
    for client in ("much", "more"):
        assert peer.connection.may_begin(client, "")
        peer.connection.begin(call_of(client, message(bytes(400_000))))
        # One of its requests is under way at a time.
        assert not peer.connection.may_begin(client, "")
    assert peer.connection.may_begin("small", "")
    peer.connection.begin(call_of("small", message(b"small")))
    small = FIRST + 6
    peer.wire.take()
    # Each gets a frame, and the small one has all it needs.
    peer.says(*(frames.window_update(number, 500_000) for number in (FIRST + 2, FIRST + 4)))
    peer.says(frames.window_update(0, 3 * frames.MAX_FRAME_BYTES))
    assert {number for _, number, _ in peer.sent(DATA)} == {FIRST + 2, FIRST + 4, small}
    peer.says(frames.window_update(0, 1_000_000))
    assert peer.connection.may_begin("much", "")


async def test_a_client_has_three_quarters_of_the_places_at_most() -> None:
    peer = Peer(message(b""))
    peer.says(frames.settings([(frames.SETTINGS_MAX_CONCURRENT_STREAMS, 8)]))
    calls = []
    while peer.connection.may_begin("many", ""):
        calls.append(call_of("many", message(b"")))
        peer.connection.begin(calls[-1])
    assert len(calls) == 6
    assert peer.connection.may_begin("other", "")
    calls[0].cancel()
    assert peer.connection.may_begin("many", "")


class Part(bytearray):
    """Bytes that a weak reference may have."""


async def test_a_request_is_kept_until_its_answer_and_no_longer() -> None:
    peer, part = Peer(), Part(message(b"once more"))
    kept = weakref.ref(part)
    call = LoopCall([(b":path", b"/x")], (cast(bytes, part),), bytes)
    del part
    peer.connection.begin(call)
    peer.says(frames.reset(FIRST + 2, frames.REFUSED_STREAM))
    assert peer.again == [call]
    peer.wire.take()
    peer.connection.begin(call)
    assert [payload for *_, payload in peer.sent(DATA)] == [message(b"once more")]
    assert kept() is not None
    again = FIRST + 4
    peer.says(frames.header_frames(again, OK, ends_stream=False), frames.frame(DATA, 0, again, message(b"first")))
    assert kept() is None


async def test_the_window_of_a_call_is_given_back_as_it_is_read() -> None:
    peer = Peer()
    peer.wire.take()
    part = message(bytes(16_000))
    peer.says(headers(OK), *(frames.frame(DATA, 0, FIRST, part) for _ in range(4)))
    given = {0: 0, FIRST: 0}
    for _, number, payload in peer.sent(frames.WINDOW_UPDATE):
        given[number] += NUMBER.unpack(payload)[0]
    assert given[0] > UNREAD_BYTES
    assert given[FIRST] <= UNREAD_BYTES
    for _ in range(4):
        await anext(peer.call)
    given[FIRST] += sum(NUMBER.unpack(payload)[0] for *_, payload in peer.sent(frames.WINDOW_UPDATE))
    assert given[FIRST] == 4 * len(part)


async def test_pings_and_settings_are_answered() -> None:
    peer = Peer()
    peer.wire.take()
    peer.says(frames.frame(PING, 0, 0, b"12345678"), frames.settings([]), frames.frame(PING, ACK, 0, b"87654321"))
    assert peer.wire.take() == [(PING, ACK, 0, b"12345678"), (SETTINGS, ACK, 0, b"")]


async def test_a_call_that_the_server_has_not_looked_at_is_handed_back() -> None:
    for refusal in (frames.reset(FIRST, frames.REFUSED_STREAM), frames.goaway(0, 0)):
        peer = Peer()
        peer.says(refusal)
        assert peer.again == [peer.call]
        assert not peer.call.has_ended


async def test_a_server_that_leaves_finishes_the_calls_that_it_has() -> None:
    peer = Peer()
    peer.says(frames.frame(GOAWAY, 0, 0, NUMBER.pack(FIRST) + NUMBER.pack(0)))
    assert not peer.connection.is_open
    peer.says(headers(OK), frames.frame(DATA, 0, FIRST, message(b"last")))
    assert not peer.wire.is_closed
    peer.says(trailers())
    assert [one async for one in peer.call] == [b"last"]
    assert peer.wire.is_closed


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (headers([(b":status", b"503")], ends=True), grpc.StatusCode.UNAVAILABLE),
        (
            headers([(b":status", b"404")]) + frames.frame(DATA, END_STREAM, FIRST, b"<html>"),
            grpc.StatusCode.UNIMPLEMENTED,
        ),
        (headers([(b":status", b"418")], ends=True), grpc.StatusCode.UNKNOWN),
        (headers(OK) + frames.frame(DATA, END_STREAM, FIRST, message(b"")), grpc.StatusCode.UNKNOWN),
        (headers(OK) + frames.frame(DATA, 0, FIRST, b"<html>"), grpc.StatusCode.INTERNAL),
        (headers(OK) + frames.frame(DATA, 0, FIRST, b"\0\xff\xff\xff\xff"), grpc.StatusCode.INTERNAL),
        (headers(OK) + trailers(b"99"), grpc.StatusCode.UNKNOWN),
        (headers(OK) + trailers(b"x"), grpc.StatusCode.UNKNOWN),
        (frames.reset(FIRST, frames.CANCEL), grpc.StatusCode.CANCELLED),
        (frames.reset(FIRST, frames.ENHANCE_YOUR_CALM), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (frames.reset(FIRST, frames.PROTOCOL_ERROR), grpc.StatusCode.INTERNAL),
    ],
)
async def test_answers_without_a_status_get_one(answer: bytes, code: grpc.StatusCode) -> None:
    peer = Peer()
    peer.says(answer)
    assert (await peer.error()).code() == code
    assert not peer.wire.is_closed


@pytest.mark.parametrize(
    "nonsense",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        frames.HEAD.pack((frames.MAX_FRAME_BYTES + 1) << 8 | DATA, 0, FIRST),
        frames.frame(HEADERS, 0, FIRST, b"\x88") + frames.frame(PING, 0, 0, bytes(8)),
        frames.frame(CONTINUATION, 0, FIRST, b"\x88"),
        frames.frame(HEADERS, END_HEADERS, FIRST, b"\xff\xff\xff\xff\xff\xff\xff\xff\x0f"),
        frames.frame(frames.WINDOW_UPDATE, 0, FIRST, b"\0"),
        frames.frame(SETTINGS, 0, 0, b"\0"),
        frames.frame(GOAWAY, 0, 0, b"\0"),
    ],
)
async def test_nonsense_ends_the_connection_with_an_error_for_its_calls(nonsense: bytes) -> None:
    peer = Peer()
    peer.says(nonsense)
    assert peer.wire.is_closed
    assert peer.connection.is_lost
    assert (await peer.error()).code() == grpc.StatusCode.UNAVAILABLE


async def test_a_cancelled_call_is_reset_and_what_still_comes_is_dropped() -> None:
    peer = Peer()
    peer.says(headers(OK), frames.frame(DATA, 0, FIRST, message(b"one")))
    peer.wire.take()
    peer.call.cancel()
    assert peer.wire.take() == [(frames.RST_STREAM, 0, FIRST, NUMBER.pack(frames.CANCEL))]
    peer.says(frames.frame(DATA, 0, FIRST, message(bytes(20_000)[:16_000])), trailers())
    with pytest.raises(asyncio.CancelledError):
        await anext(peer.call)
    assert not peer.wire.is_closed


async def test_calls_besides_the_first_of_a_connection_share_few_places() -> None:
    peer = Peer()
    peer.says(frames.settings([(frames.SETTINGS_MAX_CONCURRENT_STREAMS, 1024)]))
    calls: list[LoopCall[bytes]] = []

    def begin_all(connection: str, most: int) -> int:
        begun = 0
        while begun < most and peer.connection.may_begin("a", connection):
            calls.append(LoopCall([(b":path", b"/x")], (b"\0\0\0\0\0",), bytes, "a", connection))
            peer.connection.begin(calls[-1])
            begun += 1
        return begun

    assert [begin_all("many", 500), begin_all("many", 500), begin_all("one", 500), begin_all("two", 1)] == [65, 0, 1, 1]
    calls[0].cancel()
    assert begin_all("many", 500) == 1
    for call in calls:
        call.cancel()
    assert begin_all("one", 500) == 65
    peer.connection.close()
