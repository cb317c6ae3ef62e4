"""Channel and stub of a peer, recreated after certificates change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import grpc

from coppice.net.certificates import Certificates
from coppice.net.rpc import PEER_KEEPALIVE_MS, open_channel
from orchestrator.peers.peer_stream import CHANNEL_BACKOFF_MAX_MS

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
        self._open()

    async def renew(self) -> None:
        """Reopen it if certificates have changed. Call between streams: an open stream ends."""
        if self._certificates is not None and self._certificates.current() is not self._pems:
            await self.close()
            self._open()

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    def _open(self) -> None:
        # Before dialling: a change in between is seen by the next `renew`.
        self._pems = None if self._certificates is None else self._certificates.current()
        self._channel = self._dial()
        self.stub = self._new_stub(self._channel)
