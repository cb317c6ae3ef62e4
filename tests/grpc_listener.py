"""A gRPC server of a test on a free port."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import grpc


@contextlib.asynccontextmanager
async def listening(server: grpc.aio.Server) -> AsyncIterator[str]:
    """Serve while the context is open; gives the address to call."""
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
