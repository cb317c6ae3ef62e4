"""Calls that the guard has passed on and the server has not begun: few, so that a newcomer waits for few of them.

gRPC takes calls one after the other. Without a bound, a burst of one client's calls would stand there before the next
call of another client.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

# The client's address, in each call's metadata: one value per connection.
PEER_KEY = "x-coppice-peer"
MAX_PENDING = 32
# A call that the server has not begun for so long is counted no more: nothing may wait for it for ever.
_MAX_PENDING_S = 1.0

Handler = Any  # grpc.RpcMethodHandler, whose type parameters exist for the type checker alone


class PendingCalls:
    """At most `most` of them, where the server tells with what it begins (`BeginsCalls`).

    Calls are named by their connection's peer and their number towards the server. Used on one event loop.
    """

    def __init__(self, most: float = math.inf) -> None:
        self._most = most
        # When they were passed on, in that order.
        self._passed_s: dict[tuple[str, int], float] = {}

    @property
    def is_full(self) -> bool:
        """Whether no more calls may be passed on now."""
        if len(self._passed_s) < self._most:
            return False
        now_s = asyncio.get_running_loop().time()
        late = [call for call, passed_s in self._passed_s.items() if passed_s < now_s - _MAX_PENDING_S]
        for call in late:
            del self._passed_s[call]
        return len(self._passed_s) >= self._most

    def passed(self, peer: str, number: int) -> None:
        """A call is passed on."""
        self._passed_s[peer, number] = asyncio.get_running_loop().time()

    def begun(self, peer: str) -> None:
        """The server has begun with a connection's next call."""
        call = next((call for call in self._passed_s if call[0] == peer), None)
        if call is not None:
            del self._passed_s[call]

    def ended(self, peer: str, number: int) -> None:
        """A call has ended, or its connection has, whether or not the server has begun with it."""
        self._passed_s.pop((peer, number), None)


class BeginsCalls(grpc.aio.ServerInterceptor):
    """Tells the guard of each call that the server begins with."""

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
