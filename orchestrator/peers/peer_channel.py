"""The channel to a back end and its stub, both made anew when certificates have changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import grpc

from coppice.net.certificates import Certificates
from coppice.net.rpc import PEER_KEEPALIVE_MS, open_channel
from orchestrator.peers.peer_stream import CHANNEL_BACKOFF_MAX_MS

Stub = TypeVar("Stub")
# From a peer's address, and the certificates if any, to a channel.
Dial = Callable[[str, Certificates | None], grpc.aio.Channel]


def dial(address: str, certificates: Certificates | None) -> grpc.aio.Channel:
    """A channel through the network."""
    return open_channel(address, CHANNEL_BACKOFF_MAX_MS, PEER_KEEPALIVE_MS, certificates)


class PeerChannel(Generic[Stub]):
    """Plaintext without certificates. With them it shows those that it was opened with, since gRPC has no others."""

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
        """Open it anew where certificates have changed. To be called between two streams: one that is open ends."""
        if self._certificates is not None and self._certificates.current() is not self._pems:
            await self.close()
            self._open()

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    def _open(self) -> None:
        # Before the channel looks: a change in between is seen the next time.
        self._pems = None if self._certificates is None else self._certificates.current()
        self._channel = self._dial()
        self.stub = self._new_stub(self._channel)
