"""Channel and stub of a peer, recreated after certificates change, and for a peer that is not reached."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import grpc

from coppice.net.certificates import Certificates
from coppice.net.rpc import PEER_KEEPALIVE_MS, open_channel
from orchestrator.peers.peer_stream import CHANNEL_BACKOFF_MAX_MS

# Least time between two channels to a peer that is not reached. A channel resolves a name every 30 s at most, and one
# that does not exist after up to two minutes; a new channel does at once. A replica that is new, or has a new
# address, would not be found for so long.
RESOLVE_S = 5.0

Stub = TypeVar("Stub")
# Opens a channel to an address, with the certificates if any.
Dial = Callable[[str, Certificates | None], grpc.aio.Channel]


def dial(address: str, certificates: Certificates | None) -> grpc.aio.Channel:
    """A network channel."""
    return open_channel(address, CHANNEL_BACKOFF_MAX_MS, PEER_KEEPALIVE_MS, certificates)


class PeerChannel(Generic[Stub]):
    """Channel to a peer; plaintext without certificates. gRPC fixes the certificates of a channel when it is opened."""

    def __init__(
        self,
        address: str,
        new_stub: Callable[[grpc.aio.Channel], Stub],
        certificates: Certificates | None,
        dial: Dial = dial,
    ) -> None:
        self._dial = partial(dial, address, certificates)
        self._new_stub = new_stub
        self._certificates = certificates
        self._is_reached = False
        self._open()

    async def renew(self) -> None:
        """Reopen it if certificates have changed, or to resolve the name. Call between streams: an open stream ends.

        After `reached` it is tried once more as it is: it has addresses, and DNS may not answer now.
        """
        has_changed = self._certificates is not None and self._certificates.current() is not self._pems
        was_reached, self._is_reached = self._is_reached, False
        if has_changed or (not was_reached and time.monotonic() - self._opened_s > RESOLVE_S):
            await self.close()
            self._open()

    def reached(self) -> None:
        """Note that its stream is open."""
        self._is_reached = True

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    def _open(self) -> None:
        # Before dialling: a change in between is seen by the next `renew`.
        self._pems = None if self._certificates is None else self._certificates.current()
        self._channel, self._opened_s = self._dial(), time.monotonic()
        self.stub = self._new_stub(self._channel)
