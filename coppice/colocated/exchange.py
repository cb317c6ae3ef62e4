"""One call in memory: its two directions, how it ends, and who is told."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

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


Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class Status:
    """How a call has ended."""

    code: grpc.StatusCode
    details: str = ""
    trailing_metadata: Metadata = ()


OK = Status(grpc.StatusCode.OK)
CANCELLED = Status(grpc.StatusCode.CANCELLED, "cancelled by its client")


class Exchange:
    """What client and server share of a call. It ends once, whoever ends it first; with `timeout_s`, by itself."""

    def __init__(self, timeout_s: float | None = None, metadata: Metadata = ()) -> None:
        loop = asyncio.get_running_loop()
        self.requests: Pipe[Any] = Pipe()
        self.responses: Pipe[Any] = Pipe()
        self.metadata = metadata
        self.deadline_s = None if timeout_s is None else loop.time() + timeout_s
        # None while it lasts.
        self.status: Status | None = None
        # Told when the client or the deadline has ended it: the server's work is of no use any more.
        self.on_abandoned: Callable[[], object] | None = None
        expired = Status(grpc.StatusCode.DEADLINE_EXCEEDED, f"not finished within {timeout_s} s")
        self._timer = None if timeout_s is None else loop.call_later(timeout_s, self.abandon, expired)

    @property
    def time_remaining_s(self) -> float | None:
        """Until the deadline; None where there is none."""
        return None if self.deadline_s is None else max(0.0, self.deadline_s - asyncio.get_running_loop().time())

    def finish(self, status: Status) -> None:
        """The server has ended it; its client still reads what was said before."""
        if self._end(status):
            self.responses.close()

    def abandon(self, status: Status) -> bool:
        """The client or the deadline has ended it, unless it had ended before: nothing more is heard on either side."""
        if not self._end(status):
            return False
        self.responses.break_off()
        if self.on_abandoned is not None:
            self.on_abandoned()
        return True

    def _end(self, status: Status) -> bool:
        if self.status is not None:
            return False
        self.status = status
        self.requests.break_off()
        if self._timer is not None:
            self._timer.cancel()
        return True
