"""The fake verifier and the fake drafter, as servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc

from coppice import rpc
from coppice.certificates import Certificates, server_credentials
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
    server = grpc.aio.server(
        options=[("grpc.so_reuseport", 0), ("grpc.http2.min_ping_interval_without_data_ms", rpc.MIN_PING_INTERVAL_MS)]
    )
    if isinstance(fake, FakeVerifier):
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(fake, server)
    else:
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(fake, server)
    if certificates is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, server_credentials(certificates))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def eventually(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Return as soon as something holds; fail when it does not in time."""
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 - anything may be asked for, not only what sets an event
            await asyncio.sleep(0.005)
