"""Writing one side of a stream: in order, and without a turn of the event loop where none is needed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import grpc

from coppice.net.first_step import start_now

Message = TypeVar("Message")
# What writing to a stream raises that has ended, whichever side we are.
_OVER = (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError, asyncio.CancelledError)


class MessageWriter(Generic[Message]):
    """Sends messages in order and never blocks the caller.

    A message that no other is ahead of is written within `send`: a round waits for it, and not for the event loop's
    next turn.
    """

    def __init__(self, write: Callable[[Message], Awaitable[None]], on_over: Callable[[], object]) -> None:
        """`write` sends one message and raises when the stream is over, of which `on_over` is told, once."""
        self._write_one = write
        self._on_over = on_over
        self._waiting: deque[Message] = deque()
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    @property
    def num_waiting(self) -> int:
        """Messages that wait for the one that is being written."""
        return len(self._waiting)

    def send(self, message: Message) -> None:
        """Send a message; it is dropped when the stream is over."""
        if self._is_over:
            return
        self._waiting.append(message)
        if self._task is None or self._task.done():
            self._task = start_now(self._write())

    async def flush(self) -> None:
        """Return when all messages have been written, or never will be."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def close(self) -> None:
        """Stop writing."""
        self._is_over = True
        if self._task is not None:
            self._task.cancel()
            # Not `await`: its CancelledError could not be told from our own.
            await asyncio.wait({self._task})

    async def _write(self) -> None:
        """Write what waits; ends when nothing does. Whoever sends must not see errors: they are the stream's own."""
        try:
            while self._waiting:
                await self._write_one(self._waiting.popleft())
        except _OVER:
            if not self._is_over:
                self._is_over = True
                self._on_over()
