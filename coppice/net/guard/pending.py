"""Calls forwarded to the server and not started there: bounded, so that new clients do not wait long.

gRPC starts calls one after the other. Without a bound, a burst of one client's calls would be queued before the next
client's.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

# Metadata key of the client's address, one value per connection.
PEER_KEY = "x-coppice-peer"
# On a saturated machine gRPC takes 10 ms to start one, and a newcomer's waits for all of these.
MAX_PENDING = 4
# Seconds after which a call no longer counts, so that none can block the others.
_MAX_PENDING_S = 1.0

Handler = Any  # grpc.RpcMethodHandler, whose type parameters only exist for type checkers


class PendingCalls:
    """At most `most` calls, if the server reports those it starts (`BeginsCalls`).

    Calls are keyed by peer and upstream stream id. For use on one event loop.
    """

    def __init__(self, most: float = math.inf) -> None:
        self._most = most
        # Time of forwarding, in order.
        self._passed_s: dict[tuple[str, int], float] = {}

    @property
    def is_full(self) -> bool:
        """Whether no more calls may be forwarded."""
        if len(self._passed_s) < self._most:
            return False
        now_s = asyncio.get_running_loop().time()
        late = [call for call, passed_s in self._passed_s.items() if passed_s < now_s - _MAX_PENDING_S]
        for call in late:
            del self._passed_s[call]
        return len(self._passed_s) >= self._most

    def passed(self, peer: str, number: int) -> None:
        """Add a forwarded call."""
        self._passed_s[peer, number] = asyncio.get_running_loop().time()

    def begun(self, peer: str) -> None:
        """Remove a connection's oldest call, which the server has started."""
        call = next((call for call in self._passed_s if call[0] == peer), None)
        if call is not None:
            del self._passed_s[call]

    def ended(self, peer: str, number: int) -> None:
        """Remove a call that has ended, started or not."""
        self._passed_s.pop((peer, number), None)


class BeginsCalls(grpc.aio.ServerInterceptor):
    """Reports each call that the server starts."""

    def __init__(self, pending: PendingCalls) -> None:
        self._pending = pending

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The method's own handler."""
        for key, value in handler_call_details.invocation_metadata:
            if key == PEER_KEY and isinstance(value, str):
                self._pending.begun(value)
        return await continuation(handler_call_details)
