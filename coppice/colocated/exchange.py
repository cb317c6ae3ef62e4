"""State of one in-memory call: two pipes and its status."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

Message = TypeVar("Message")

# Messages in a pipe before its writer waits, like gRPC's flow control.
MAX_ON_THE_WAY = 64


class PipeOverError(asyncio.InvalidStateError):
    """The pipe is closed; the base class is gRPC's error for this."""


class Pipe(Generic[Message]):
    """Message pipe for one event loop. Messages are passed by reference: writers must not change them afterwards.

    Readers run after `put` has returned, never inside it.
    """

    def __init__(self, limit: int = MAX_ON_THE_WAY) -> None:
        self._limit = limit
        self._messages: deque[Message] = deque()
        self._is_over = False
        self._may_read = asyncio.Event()
        self._may_write = asyncio.Event()

    async def put(self, message: Message) -> None:
        """Add a message; waits only while the pipe is full.

        Raises:
            PipeOverError: the pipe is closed.
        """
        while len(self._messages) >= self._limit and not self._is_over:
            self._may_write.clear()
            await self._may_write.wait()
        if self._is_over:
            raise PipeOverError
        self._messages.append(message)
        self._may_read.set()

    async def get(self) -> Message:
        """Take the next message.

        Raises:
            PipeOverError: the pipe is closed and empty.
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
        """Close the pipe; queued messages can still be read."""
        self._is_over = True
        self._may_read.set()
        self._may_write.set()

    def break_off(self) -> None:
        """Close the pipe and drop queued messages."""
        self._messages.clear()
        self.close()


Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class Status:
    """Status of a finished call."""

    code: grpc.StatusCode
    details: str = ""
    trailing_metadata: Metadata = ()


OK = Status(grpc.StatusCode.OK)
CANCELLED = Status(grpc.StatusCode.CANCELLED, "cancelled by its client")


class Exchange:
    """State shared by client and server. The first end counts; `timeout_s` ends the call by itself."""

    def __init__(self, timeout_s: float | None = None, metadata: Metadata = ()) -> None:
        loop = asyncio.get_running_loop()
        self.requests: Pipe[Any] = Pipe()
        self.responses: Pipe[Any] = Pipe()
        self.metadata = metadata
        self.deadline_s = None if timeout_s is None else loop.time() + timeout_s
        # None while the call runs.
        self.status: Status | None = None
        # Called when the client or the deadline ends the call, so that the server can stop its work.
        self.on_abandoned: Callable[[], object] | None = None
        expired = Status(grpc.StatusCode.DEADLINE_EXCEEDED, f"not finished within {timeout_s} s")
        self._timer = None if timeout_s is None else loop.call_later(timeout_s, self.abandon, expired)

    @property
    def time_remaining_s(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self.deadline_s is None else max(0.0, self.deadline_s - asyncio.get_running_loop().time())

    def finish(self, status: Status) -> None:
        """End the call on the server's side; queued responses can still be read."""
        if self._end(status):
            self.responses.close()

    def abandon(self, status: Status) -> bool:
        """End the call by the client or deadline, unless it has ended; drops all messages. Returns whether it did."""
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
