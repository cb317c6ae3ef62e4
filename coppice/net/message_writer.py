"""Writer of one side of a stream: in order, and at once when possible."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import grpc

from coppice.net.first_step import start_now

Message = TypeVar("Message")
# Messages that may pass a large one that waits.
MOST_PASSING = 256
# Errors from writing to a stream that has ended, on either side.
_OVER = (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError, asyncio.CancelledError)


class MessageWriter(Generic[Message]):
    """Sends messages in order without blocking the caller.

    A message with none queued before it is written inside `send`: a round waits for it, not for the event loop's next
    iteration. A lane that begins with a large message waits until nothing else does, or `MOST_PASSING` messages have
    passed it.
    """

    def __init__(self, write: Callable[[Message], Awaitable[None]], on_over: Callable[[], object]) -> None:
        """`write` sends one message and raises if the stream is over; `on_over` is then called once."""
        self._write_one = write
        self._on_over = on_over
        self._waiting: deque[Message] = deque()
        # Messages of lanes that begin with a large one.
        self._lanes: dict[int, list[Message]] = {}
        # Messages written since the last lane went.
        self._num_passing = 0
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    @property
    def num_waiting(self) -> int:
        """Queued messages."""
        return len(self._waiting) + sum([len(messages) for messages in self._lanes.values()])

    def send(self, message: Message, lane: int = 0, *, is_large: bool = False) -> None:
        """Send a message; dropped if the stream is over. Those of a lane stay in order, others may pass a large one."""
        if self._is_over:
            return
        if lane in self._lanes:
            self._lanes[lane].append(message)
        elif is_large:
            self._lanes[lane] = [message]
        else:
            self._waiting.append(message)
        if self._task is None or self._task.done():
            self._task = start_now(self._write())

    def withdraw(self, lane: int) -> bool:
        """Drop the messages of a lane that waits with a large one; False if it does not."""
        return self._lanes.pop(lane, None) is not None

    async def flush(self) -> None:
        """Wait until all messages are written or dropped."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def close(self) -> None:
        """Stop writing."""
        self._is_over = True
        if self._task is not None:
            self._task.cancel()
            # Not `await`: its CancelledError would look like our own.
            await asyncio.wait({self._task})

    async def _write(self) -> None:
        """Write queued messages. Errors are the stream's and must not reach senders."""
        try:
            while self._waiting or self._lanes:
                if self._lanes and (not self._waiting or self._num_passing >= MOST_PASSING):
                    self._waiting.extendleft(reversed(self._lanes.pop(next(iter(self._lanes)))))
                    self._num_passing = 0
                self._num_passing += 1
                await self._write_one(self._waiting.popleft())
        except _OVER:
            if not self._is_over:
                self._is_over = True
                self._on_over()
