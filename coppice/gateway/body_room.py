"""Memory for the bodies of requests: large ones are read when there is room for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator

# Bodies up to this size are read at once: as many as there are connections fit into memory.
SMALL_BYTES = 128 * 1024
MAX_LARGE_BYTES = 32 * 1024 * 1024


class BodyRoom:
    """Bytes of large bodies at a time; one of any size is read alone.

    The next is of the host that holds least, in order of arrival.
    """

    def __init__(self, max_bytes: int = MAX_LARGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    @contextlib.asynccontextmanager
    async def hold(self, num_bytes: int, host: str) -> AsyncIterator[None]:
        """Wait until a host's body of this size has room, and hold that while the context is open."""
        if num_bytes <= SMALL_BYTES:
            yield
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(host, deque()).append((num_bytes, turn))
        self._let_in()
        try:
            await turn
            yield
        finally:
            # Cancelled while it waited, it has none.
            if not turn.cancelled():
                self._held -= Counter({host: num_bytes})
            self._let_in()

    def _let_in(self) -> None:
        while self._waiting:
            host = min(self._waiting, key=self._held.__getitem__)
            num_bytes, turn = self._waiting[host][0]
            if not turn.cancelled():
                if self._held and self._held.total() + num_bytes > self._max_bytes:
                    return
                self._held[host] += num_bytes
                turn.set_result(None)
            self._waiting[host].popleft()
            if not self._waiting[host]:
                del self._waiting[host]
