"""Writer of one side of a stream: in order, and at once when possible."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import grpc

from coppice.net.first_step import start_now

Message = TypeVar("Message")
# Errors from writing to a stream that has ended, on either side.
_OVER = (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError, asyncio.CancelledError)


class MessageWriter(Generic[Message]):
    """Sends messages in order without blocking the caller.

    A message with none queued before it is written inside `send`: a round waits for it, not for the event loop's next
    iteration.
    """

    def __init__(self, write: Callable[[Message], Awaitable[None]], on_over: Callable[[], object]) -> None:
        """`write` sends one message and raises if the stream is over; `on_over` is then called once."""
        self._write_one = write
        self._on_over = on_over
        self._waiting: deque[Message] = deque()
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    @property
    def num_waiting(self) -> int:
        """Queued messages."""
        return len(self._waiting)

    def send(self, message: Message) -> None:
        """Send a message; dropped if the stream is over."""
        if self._is_over:
            return
        self._waiting.append(message)
        if self._task is None or self._task.done():
            self._task = start_now(self._write())

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
            while self._waiting:
                await self._write_one(self._waiting.popleft())
        except _OVER:
            if not self._is_over:
                self._is_over = True
                self._on_over()
