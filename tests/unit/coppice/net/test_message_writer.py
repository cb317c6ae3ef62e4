"""Messages are written at once, in order, and no more once the stream is over."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from coppice.net.message_writer import MOST_PASSING, MessageWriter


class Stream:
    """Takes a message when it is told to, or fails."""

    def __init__(self, fails: BaseException | None = None) -> None:
        self.begun: list[int] = []
        self.taken: list[int] = []
        self.may_take = asyncio.Semaphore(0)
        self.fails = fails
        self.num_ends = 0

    async def write(self, message: int) -> None:
        self.begun.append(message)
        if self.fails is not None:
            raise self.fails
        await self.may_take.acquire()
        self.taken.append(message)

    def end(self) -> None:
        self.num_ends += 1


async def test_the_first_message_is_being_written_before_the_sender_goes_on() -> None:
    stream = Stream()
    writer = MessageWriter(stream.write, stream.end)
    for message in range(3):
        writer.send(message)
    assert (stream.begun, writer.num_waiting) == ([0], 2)
    for _ in range(3):
        stream.may_take.release()
    await asyncio.wait_for(writer.flush(), 5)
    assert (stream.taken, writer.num_waiting, stream.num_ends) == ([0, 1, 2], 0, 0)


async def test_nothing_is_written_once_the_writer_is_closed() -> None:
    stream = Stream()
    writer = MessageWriter(stream.write, stream.end)
    writer.send(0)
    writer.send(1)
    await asyncio.wait_for(writer.close(), 5)
    writer.send(2)
    stream.may_take.release()
    await asyncio.sleep(0)
    assert (stream.begun, stream.taken, stream.num_ends) == ([0], [], 0)


@pytest.mark.parametrize("failure", [asyncio.InvalidStateError(), asyncio.CancelledError(), grpc.aio.UsageError()])
async def test_a_stream_that_is_over_is_reported_once_and_spares_the_sender(failure: BaseException) -> None:
    stream = Stream(failure)
    writer = MessageWriter(stream.write, stream.end)
    writer.send(0)
    writer.send(1)
    await asyncio.wait_for(writer.flush(), 5)
    assert (stream.begun, stream.num_ends) == ([0], 1)


async def test_a_bug_in_writing_is_no_end_of_the_stream() -> None:
    stream = Stream(ValueError("not serialisable"))
    writer = MessageWriter(stream.write, stream.end)
    with pytest.raises(ValueError, match="serialisable"):
        writer.send(0)


async def written(writer: MessageWriter[int], stream: Stream, count: int) -> list[int]:
    for _ in range(count):
        stream.may_take.release()
    await asyncio.wait_for(writer.flush(), 5)
    return stream.taken


async def test_a_large_message_lets_others_pass_and_its_own_lane_stays_in_order() -> None:
    stream = Stream()
    writer = MessageWriter(stream.write, stream.end)
    writer.send(0)
    writer.send(10, lane=1, is_large=True)
    writer.send(20, lane=2, is_large=True)
    writer.send(11, lane=1)
    writer.send(30, lane=3)
    writer.send(12, lane=1)
    assert writer.num_waiting == 5
    assert await written(writer, stream, 6) == [0, 30, 10, 11, 12, 20]


async def test_a_lane_that_is_withdrawn_is_not_written() -> None:
    stream = Stream()
    writer = MessageWriter(stream.write, stream.end)
    writer.send(0)
    writer.send(10, lane=1, is_large=True)
    writer.send(11, lane=1)
    writer.send(20, lane=2)
    assert writer.withdraw(1)
    assert not writer.withdraw(1)
    assert not writer.withdraw(2)
    assert await written(writer, stream, 2) == [0, 20]


async def test_a_large_message_is_not_passed_for_ever() -> None:
    stream = Stream()
    writer = MessageWriter(stream.write, stream.end)
    writer.send(0)
    writer.send(-1, lane=1, is_large=True)
    for message in range(2 * MOST_PASSING):
        writer.send(message, lane=2)
    assert (await written(writer, stream, 2 * MOST_PASSING + 2)).index(-1) == MOST_PASSING
