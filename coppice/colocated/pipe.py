"""One direction of a call: messages in order, at most so many on their way, until it ends."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

Message = TypeVar("Message")

# Who writes more than its reader has taken waits, as gRPC's flow control has it.
MAX_ON_THE_WAY = 64


class PipeOverError(asyncio.InvalidStateError):
    """Nothing is taken any more; gRPC has the base class for it."""


class Pipe(Generic[Message]):
    """For one event loop. Messages are handed over as they are: whoever has put one must not change it any more.

    A reader has its turn after `put` has returned, never within it.
    """

    def __init__(self, limit: int = MAX_ON_THE_WAY) -> None:
        self._limit = limit
        self._messages: deque[Message] = deque()
        self._is_over = False
        self._may_read = asyncio.Event()
        self._may_write = asyncio.Event()

    async def put(self, message: Message) -> None:
        """Hand a message over; waits only while the reader is behind.

        Raises:
            PipeOverError: the pipe has ended.
        """
        while len(self._messages) >= self._limit and not self._is_over:
            self._may_write.clear()
            await self._may_write.wait()
        if self._is_over:
            raise PipeOverError
        self._messages.append(message)
        self._may_read.set()

    async def get(self) -> Message:
        """The next message.

        Raises:
            PipeOverError: there is none left, and none will follow.
        """
        while not self._messages and not self._is_over:
            self._may_read.clear()
            await self._may_read.wait()
        if not self._messages:
            raise PipeOverError
        message = self._messages.popleft()
        self._may_write.set()
        return message

    def close(self) -> None:
        """Nothing follows what is on its way."""
        self._is_over = True
        self._may_read.set()
        self._may_write.set()

    def break_off(self) -> None:
        """Nothing follows, and what is on its way is lost."""
        self._messages.clear()
        self.close()
