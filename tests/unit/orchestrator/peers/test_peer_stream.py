"""A stream to a peer: when messages are written, in which order, and what becomes of those that cannot be."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from orchestrator.peers.peer_stream import LARGE_BYTES, MAX_UNSENT, PeerStream


class Call:
    """A call that takes a message only when it is told to."""

    def __init__(self, *, fails: BaseException | None = None) -> None:
        self.begun: list[int] = []
        self.taken: list[int] = []
        self.may_take = asyncio.Semaphore(0)
        self.cancelled = asyncio.Event()
        self.fails = fails

    async def wait_for_connection(self) -> None: ...

    def cancel(self) -> None:
        self.cancelled.set()

    async def write(self, message: int) -> None:
        self.begun.append(message)
        if self.fails is not None:
            raise self.fails
        await self.may_take.acquire()
        self.taken.append(message)

    async def __aiter__(self) -> AsyncIterator[int]:
        await self.cancelled.wait()
        for message in ():
            yield message


class Owner:
    """Sends `first` as soon as the stream is up, and notes how long it lasts."""

    def __init__(self, *first: int) -> None:
        self.first = first
        self.stream: PeerStream[int, int]
        self.is_up = asyncio.Event()
        self.is_down = asyncio.Event()

    async def handshake(self) -> None: ...

    def on_up(self) -> None:
        for message in self.first:
            self.stream.send(message, 0)
        self.is_up.set()

    def on_message(self, message: int) -> None: ...

    def on_down(self) -> None:
        self.is_down.set()


@contextlib.asynccontextmanager
async def connected(call: Call, *first: int) -> AsyncIterator[Owner]:
    owner = Owner(*first)
    calls: list[Any] = [call]
    owner.stream = PeerStream("peer", lambda: calls.pop() if calls else Call(), owner)  # type: ignore[arg-type,return-value]
    owner.stream.start()
    await owner.is_up.wait()
    yield owner
    await owner.stream.stop()


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_a_peer_that_ends_its_streams_at_once_is_called_rarely() -> None:
    def ended() -> Call:
        call = Call()
        call.cancel()
        return call

    owner = Owner()
    owner.stream = PeerStream("peer", ended, owner)  # type: ignore[arg-type,return-value]
    owner.stream.start()
    await asyncio.sleep(1.0)
    await owner.stream.stop()
    assert 2 <= owner.stream.num_lost <= 8


async def test_a_message_is_being_written_before_the_sender_goes_on() -> None:
    call = Call()
    async with connected(call) as owner:
        owner.stream.send(1, 0)
        assert call.begun == [1]
        call.may_take.release()
        await turns(4)
        owner.stream.send(2, 0)
        assert (call.begun, call.taken) == ([1, 2], [1])


async def test_a_message_reaches_the_peer_while_the_sender_holds_the_event_loop() -> None:
    arrived = threading.Event()

    def read(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.send_initial_metadata(())
        for _ in requests:
            arrived.set()
            yield b""

    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    handler = grpc.stream_stream_rpc_method_handler(read)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Peer", {"Talk": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        owner = Owner()
        owner.stream = PeerStream("peer", channel.stream_stream("/test.Peer/Talk"), owner)
        owner.stream.start()
        await asyncio.wait_for(owner.is_up.wait(), 5)
        owner.stream.send(b"a message", 0)  # type: ignore[arg-type]
        # Blocks the loop on purpose.
        assert arrived.wait(5)
        await owner.stream.stop()
    server.stop(None)


async def test_messages_are_written_one_at_a_time_and_in_order() -> None:
    call = Call()
    async with connected(call, 1, 2) as owner:
        owner.stream.send(3, 0)
        assert call.begun == [1]
        for number in range(1, 4):
            call.may_take.release()
            await turns(4)
            assert call.taken == list(range(1, number + 1))
            assert call.begun == list(range(1, min(3, number + 1) + 1))


async def test_a_write_that_fails_drops_the_stream_and_spares_the_sender() -> None:
    for failure in (asyncio.InvalidStateError(), asyncio.CancelledError()):
        async with connected(Call(fails=failure)) as owner:
            owner.stream.send(1, 0)
            await asyncio.wait_for(owner.is_down.wait(), 5)


async def test_a_peer_that_stops_reading_loses_its_stream() -> None:
    call = Call()
    async with connected(call) as owner:
        for message in range(MAX_UNSENT + 1):
            owner.stream.send(message, 0)
        assert not call.cancelled.is_set()
        owner.stream.send(-1, 0)
        await asyncio.wait_for(owner.is_down.wait(), 5)
        assert call.begun == [0]


async def test_the_end_of_a_stream_ends_a_write_that_waits() -> None:
    call = Call()
    async with connected(call, 1) as owner:
        call.cancel()
        await asyncio.wait_for(owner.is_down.wait(), 5)
        call.may_take.release()
        await turns(4)
        assert call.taken == []


async def test_a_message_that_cannot_be_read_ends_the_stream_and_another_is_opened(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Unreadable(Call):
        async def __aiter__(self) -> AsyncIterator[Any]:
            # What gRPC gives a client for bytes that are no message.
            yield None

    async with connected(Unreadable()) as owner:
        await owner.is_down.wait()
        async with asyncio.timeout(10):
            while not owner.stream.connected:  # noqa: ASYNC110 nothing to wait on
                await asyncio.sleep(0.005)
        assert owner.stream.num_lost == 1
        # The peer is not refused for good, and it is no error of ours.
        assert owner.stream.refusal is None
    assert "it sent an unreadable message" in caplog.text
    assert "Traceback" not in caplog.text


async def test_a_large_opening_is_passed_by_others_and_may_be_withdrawn() -> None:
    call = Call()
    async with connected(call) as owner:
        stream = owner.stream
        stream.send(0, 0)
        stream.send(10, 1, LARGE_BYTES + 1)
        stream.send(20, 2, LARGE_BYTES + 1)
        stream.send(21, 2)
        stream.send(30, 3, LARGE_BYTES)
        assert stream.withdraw(1)
        assert not stream.withdraw(3)
        for _ in range(4):
            call.may_take.release()
            await turns(3)
        assert call.taken == [0, 30, 20, 21]
