"""The fake verifier and the fake drafter, as servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc

from coppice.net import rpc
from coppice.net.certificates import Certificates
from coppice.net.guard.guarded_server import GuardedServer
from coppice.net.guard.limits import GuardLimits
from coppice.net.server_contexts import ServerContexts
from coppice.v1 import drafter_pb2_grpc, verifier_pb2_grpc
from tests.fake_drafter import FakeDrafter, perfect, wrong
from tests.fake_verifier import FakeVerifier

__all__ = ["FakeDrafter", "FakeVerifier", "eventually", "perfect", "serving", "wrong"]


@contextlib.asynccontextmanager
async def serving(
    fake: FakeVerifier | FakeDrafter, address: str = "127.0.0.1:0", certificates: Certificates | None = None
) -> AsyncIterator[str]:
    """A fake as a real server; the address is the one to call."""
    # As our servers do, it bears the pings of a channel on which nothing is said for long.
    server = grpc.aio.server(options=[("grpc.http2.min_ping_interval_without_data_ms", rpc.MIN_PING_INTERVAL_MS)])
    if isinstance(fake, FakeVerifier):
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(fake, server)
        method = b"/coppice.v1.VerifierService/Verify"
    else:
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(fake, server)
        method = b"/coppice.v1.DrafterService/Draft"
    context = None
    if certificates is not None:
        asks_client = certificates.current().ca is not None
        context = ServerContexts(certificates, asks_client=asks_client, protocols=["h2"]).current
    limits = GuardLimits(rpc.MAX_MESSAGE_BYTES, rpc.MAX_CONCURRENT_STREAMS, streaming=frozenset({method}))
    guarded = GuardedServer(server, limits, context)
    port = await guarded.start(address)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await guarded.stop(0)


async def eventually(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Return as soon as something holds; fail when it does not in time."""
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 - anything may be asked for, not only what sets an event
            await asyncio.sleep(0.005)
